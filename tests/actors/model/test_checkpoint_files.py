"""Broken files and indexes are refused by name before anything is served (C2, C4)."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from expertmesh.actors.model.checkpoint import Checkpoint, CheckpointError
from expertmesh.actors.model.config import load_config
from expertmesh.actors.model.shard import read_shard
from tests.support.checkpoints import write_checkpoint
from tests.support.tampering import INDEX, change_json, read_json, shard_with, shards_of


@pytest.fixture(scope="module")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("pristine"), shards=4)


@pytest.fixture
def folder(pristine: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(pristine, tmp_path / "copy"))


def refused(folder: Path, *needles: str) -> str:
    with pytest.raises(CheckpointError) as caught:
        Checkpoint.open(folder, load_config(folder))
    message = str(caught.value)
    for needle in needles:
        assert needle in message, message
    return message


def header_length(path: Path) -> int:
    return 8 + int.from_bytes(path.read_bytes()[:8], "little")


@pytest.mark.parametrize("which", [0, 1, 3])
def test_a_shard_cut_by_one_byte(folder: Path, which: int) -> None:
    path = shards_of(folder)[which]
    size = path.stat().st_size
    os.truncate(path, size - 1)
    refused(folder, path.name, "cut off", str(size), str(size - 1))


def test_a_shard_cut_by_half_a_tensor(folder: Path) -> None:
    path = shards_of(folder)[1]
    size = path.stat().st_size
    os.truncate(path, size - 5000)
    refused(folder, path.name, str(size), str(size - 5000))


def test_a_shard_cut_inside_its_header(folder: Path) -> None:
    path = shards_of(folder)[2]
    needed = header_length(path)
    os.truncate(path, needed - 10)
    refused(folder, path.name, "inside its header", str(needed), str(needed - 10))


@pytest.mark.parametrize("size", [0, 7])
def test_a_shard_of_seven_bytes(folder: Path, size: int) -> None:
    path = shards_of(folder)[0]
    os.truncate(path, size)
    refused(folder, path.name, f"{size} bytes")


def test_a_shard_cut_to_its_header(folder: Path) -> None:
    path = shards_of(folder)[0]
    os.truncate(path, header_length(path))
    refused(folder, path.name, "cut off")


def test_a_byte_appended(folder: Path) -> None:
    path = shards_of(folder)[0]
    size = path.stat().st_size
    with path.open("ab") as file:
        file.write(b"\0")
    refused(folder, path.name, "after its last tensor", str(size), str(size + 1))


def test_a_git_lfs_pointer(folder: Path) -> None:
    path = shards_of(folder)[3]
    path.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0a\nsize 12345\n")
    refused(folder, path.name, "Git LFS pointer")


@pytest.mark.parametrize(
    "content",
    [b"<html>not found</html>", b"\xff" * 64, (4).to_bytes(8, "little") + b"[1] ",
     (2).to_bytes(8, "little") + b"{}x", (20).to_bytes(8, "little") + b'{"a":{"dtype":"F32"}'],
)  # fmt: skip
def test_something_else_in_place_of_a_shard(folder: Path, content: bytes) -> None:
    path = shards_of(folder)[0]
    path.write_bytes(content)
    refused(folder, path.name)


def fake_shard(path: Path, header: dict[str, Any], data: int) -> Path:
    raw = json.dumps(header).encode()
    path.write_bytes(len(raw).to_bytes(8, "little") + raw + bytes(data))
    return path


def entry(begin: int, end: int, shape: list[int]) -> dict[str, Any]:
    return {"dtype": "F32", "shape": shape, "data_offsets": [begin, end]}


@pytest.mark.parametrize(
    ("header", "data"),
    [
        ({"a": entry(0, 8, [2]), "b": entry(4, 12, [2])}, 12),  # overlap
        ({"a": entry(0, 8, [2]), "b": entry(12, 20, [2])}, 20),  # hole
        ({"a": entry(4, 12, [2])}, 12),  # does not start at zero
        ({"a": entry(0, 8, [3])}, 8),  # bytes do not fit the shape
        ({"a": entry(8, 0, [2])}, 8),
        ({"a": entry(-8, 0, [2])}, 0),
        ({"a": {"dtype": "F32", "shape": [2.5], "data_offsets": [0, 8]}}, 8),
        ({"a": {"dtype": 4, "shape": [2], "data_offsets": [0, 8]}}, 8),
        ({"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 1 << 70]}}, 8),
    ],
)
def test_a_header_that_lies(tmp_path: Path, header: dict[str, Any], data: int) -> None:
    with pytest.raises(CheckpointError, match=r"x\.safetensors"):
        read_shard(fake_shard(tmp_path / "x.safetensors", header, data))


def test_a_name_twice_in_one_header(tmp_path: Path) -> None:
    raw = (
        b'{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]},'
        b'"a":{"dtype":"F32","shape":[1],"data_offsets":[4,8]}}'
    )
    path = tmp_path / "x.safetensors"
    path.write_bytes(len(raw).to_bytes(8, "little") + raw + bytes(8))
    with pytest.raises(CheckpointError, match="expected to start at"):
        read_shard(path)


@given(st.binary(max_size=200))
def test_any_bytes_are_refused_without_surprise(pristine: Path, content: bytes) -> None:
    path = pristine.parent / "noise.safetensors"
    path.write_bytes(content)
    with pytest.raises(CheckpointError):
        read_shard(path)


@given(st.data())
def test_any_damaged_header_byte_is_refused_or_harmless(
    pristine: Path, data: st.DataObject
) -> None:
    """Whatever one changed header byte does, it never maps a tensor onto other bytes silently."""
    path = shards_of(pristine)[1]
    good = path.read_bytes()
    position = data.draw(st.integers(0, header_length(path) - 1))
    value = data.draw(st.integers(0, 255).filter(lambda v: v != good[position]))
    broken = pristine.parent / "damaged.safetensors"
    broken.write_bytes(good[:position] + bytes([value]) + good[position + 1 :])
    try:
        shard = read_shard(broken)
    except CheckpointError:
        return
    reference = read_shard(path)
    # A name, dtype or shape may have changed (the inventory check sees that); places may not.
    places = sorted((e.begin, e.end) for e in shard.entries.values())
    assert places == sorted((e.begin, e.end) for e in reference.entries.values())


class TestIndex:
    def test_all_shards_renamed(self, folder: Path) -> None:
        for number, path in enumerate(shards_of(folder)):
            path.rename(folder / f"model-part{number}.safetensors")
        refused(folder, "index does not match files", "model-00001-of-000004.safetensors")

    def test_it_names_more_files_than_there_are(self, folder: Path) -> None:
        def change(index: dict[str, Any]) -> None:
            for number, name in enumerate(sorted(index["weight_map"])):
                index["weight_map"][name] = f"model-{number % 8:05d}-of-000008.safetensors"

        change_json(folder / INDEX, change)
        refused(folder, "index does not match files", "of the 8 shards")

    def test_one_shard_is_gone(self, folder: Path) -> None:
        path = shards_of(folder)[2]
        path.unlink()
        refused(folder, "index does not match files", path.name)

    def test_a_shard_that_it_does_not_name(self, folder: Path) -> None:
        save_file({"x": torch.zeros(1)}, folder / "model-00005-of-000005.safetensors")
        refused(folder, "index does not match files", "model-00005-of-000005.safetensors")

    def test_a_tensor_mapped_to_the_wrong_existing_shard(self, folder: Path) -> None:
        wrong = shards_of(folder)[0].name
        right = shard_with(folder, "lm_head.weight").name
        assert wrong != right

        def change(index: dict[str, Any]) -> None:
            index["weight_map"]["language_model.lm_head.weight"] = wrong

        change_json(folder / INDEX, change)
        refused(folder, "index does not match files", "language_model.lm_head.weight", wrong, right)

    def test_a_tensor_that_no_shard_holds(self, folder: Path) -> None:
        file = shards_of(folder)[0].name
        change_json(folder / INDEX, lambda index: index["weight_map"].update(ghost=file))
        refused(folder, "index does not match files", "ghost", file)

    def test_a_tensor_that_it_does_not_name(self, folder: Path) -> None:
        change_json(
            folder / INDEX, lambda index: index["weight_map"].pop("language_model.lm_head.weight")
        )
        refused(folder, "index does not match files", "language_model.lm_head.weight")

    def test_a_tensor_in_two_shards(self, folder: Path) -> None:
        first, second = shards_of(folder)[:2]
        name, tensor = next(iter(load_file(first).items()))
        save_file(load_file(second) | {name: tensor}, second, {"format": "pt"})
        refused(folder, "in both", name, first.name, second.name)

    @pytest.mark.parametrize(
        "content", ["", "{}", "[]", "nope", '{"weight_map": {}}', '{"weight_map": []}',
                    '{"weight_map": {"a": 5}}', '{"weight_map": {"a": null}}', "[" * 100_000],
    )  # fmt: skip
    def test_not_an_index(self, folder: Path, content: str) -> None:
        (folder / INDEX).write_text(content)
        refused(folder, INDEX)

    @pytest.mark.parametrize(
        "make",
        [lambda p: f"../{p.parent.name}/{p.name}", lambda p: str(p), lambda p: f"./{p.name}",
         lambda p: f"sub/{p.name}", lambda p: f"..\\{p.name}", lambda p: "..", lambda p: "",
         lambda p: "config.json"],
    )  # fmt: skip
    def test_paths_out_of_the_folder(self, folder: Path, make: Callable[[Path], str]) -> None:
        file = make(shards_of(folder)[0])
        change_json(
            folder / INDEX,
            lambda index: index["weight_map"].update({"language_model.lm_head.weight": file}),
        )
        refused(folder, "language_model.lm_head.weight", "not the plain name")

    def test_no_index_and_no_single_file(self, folder: Path) -> None:
        (folder / INDEX).unlink()
        refused(folder, INDEX, "model.safetensors")

    def test_a_wrong_total_size_only_warns(
        self, folder: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        change_json(folder / INDEX, lambda index: index["metadata"].update(total_size=1))
        Checkpoint.open(folder, load_config(folder))
        assert "total_size" in caplog.text

    def test_no_folder(self, folder: Path) -> None:
        with pytest.raises(CheckpointError, match="no such folder"):
            Checkpoint.open(folder / "nowhere", load_config(folder))


def test_a_single_file_needs_no_index(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path, shards=1)
    assert not (folder / INDEX).exists()
    checkpoint = Checkpoint.open(folder, load_config(folder))
    assert checkpoint.summary().shards == 1


def test_other_safetensors_files_do_not_matter(folder: Path) -> None:
    save_file({"logits": torch.zeros(1)}, folder / "expected-logits.safetensors")
    Checkpoint.open(folder, load_config(folder))


def test_a_cache_of_symbolic_links_is_followed(folder: Path, tmp_path: Path) -> None:
    blobs, snapshot = tmp_path / "blobs", tmp_path / "snapshots" / "main"
    blobs.mkdir()
    snapshot.mkdir(parents=True)
    for number, path in enumerate(sorted(folder.iterdir())):
        path.rename(blobs / f"blob{number}")
        (snapshot / path.name).symlink_to(Path("../../blobs") / f"blob{number}")
    checkpoint = Checkpoint.open(snapshot, load_config(snapshot))
    assert checkpoint.tensor("lm_head.weight").shape == (320, 64)
    os.truncate(os.path.realpath(shards_of(snapshot)[0]), 100)
    refused(snapshot, shards_of(snapshot)[0].name)


def test_nothing_is_written_into_the_folder(folder: Path) -> None:
    def listing() -> dict[str, tuple[int, int]]:
        return {p.name: (p.stat().st_mtime_ns, p.stat().st_size) for p in folder.iterdir()}

    before, content = listing(), shards_of(folder)[0].read_bytes()
    folder.chmod(0o555)
    checkpoint = Checkpoint.open(folder, load_config(folder))
    for _, tensor in checkpoint.stream(checkpoint.names_for_attention()):
        tensor.zero_()  # a caller's write stays in its private copy of the map
    folder.chmod(0o755)
    assert listing() == before
    assert shards_of(folder)[0].read_bytes() == content
    assert read_json(folder / INDEX)["weight_map"]
