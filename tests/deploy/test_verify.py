"""`expertmesh verify`: every kind of damage is found, named, and told apart by the exit code."""

import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from expertmesh.deploy.cli import BUNDLED, app
from expertmesh.deploy.exit_codes import ExitCode
from expertmesh.deploy.verify import contents
from tests.support.checkpoints import write_checkpoint
from tests.support.golden import GOLDEN
from tests.support.tampering import (
    INDEX,
    change_json,
    change_tensors,
    read_json,
    replace,
    shard_with,
    shards_of,
)

Damage = Callable[[Path], object]
EXPERT = "layers.2.block_sparse_moe.experts.3."
SCALE = f"{EXPERT}w1.weight_scale"


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("tiny") / "tiny", tokenizer=True)


@pytest.fixture
def folder(tiny: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny, tmp_path / "copy"))


def run(*arguments: object) -> dict[str, Any]:
    """The report; its exit code is that of the command."""
    done = CliRunner().invoke(app, ["verify", "--json", *map(str, arguments)])
    assert done.exception is None or isinstance(done.exception, SystemExit), done.exception
    assert done.stdout, done.stderr
    report: dict[str, Any] = json.loads(done.stdout)
    assert report["exit_code"] == done.exit_code
    return report


def found(report: dict[str, Any], severity: str = "error") -> list[dict[str, str]]:
    return [one for one in report["findings"] if one["severity"] == severity]


@pytest.mark.parametrize(
    "model", [GOLDEN / "kimi_k3-tiny", GOLDEN / "kimi_linear-tiny", BUNDLED], ids=lambda p: p.name
)
def test_sound_checkpoints_are_clean(model: Path) -> None:
    report = run(model)
    assert (report["outcome"], report["errors"]) == ("clean", 0)
    assert report["summary"]["bytes"] < report["bytes_read"]
    # All there is to say of the golden ones is that they have no tokenizer.
    assert {one["check"] for one in found(report, "warning")} <= {"tokenizer"}
    quick = run(model, "--quick")
    assert quick["bytes_read"] == 0 and quick["outcome"] == "clean"


def truncate(by: int) -> Damage:
    return lambda folder: os.truncate(one := shards_of(folder)[1], one.stat().st_size - by)


def append(folder: Path) -> None:
    with shards_of(folder)[0].open("ab") as file:
        file.write(b"\0")


def pointer(folder: Path) -> None:
    shards_of(folder)[0].write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\n")


def second_copy(folder: Path) -> None:
    first, second = shards_of(folder)[:2]
    name, tensor = next(iter(load_file(first).items()))
    save_file(load_file(second) | {name: tensor}, second, {"format": "pt"})


def index(**entries: str) -> Damage:
    return lambda folder: change_json(folder / INDEX, lambda raw: raw["weight_map"].update(entries))


def text(**keys: object) -> Damage:
    return lambda folder: change_json(
        folder / "config.json", lambda raw: raw["text_config"].update(keys)
    )


def group_size(size: int) -> Damage:
    def change(raw: dict[str, Any]) -> None:
        groups = raw["text_config"]["quantization_config"]["config_groups"]
        groups["group_0"]["weights"]["group_size"] = size

    return lambda folder: change_json(folder / "config.json", change)


def tensor(ending: str, make: Callable[[torch.Tensor], torch.Tensor | None]) -> Damage:
    return lambda folder: change_tensors(folder, replace(ending, make))


def put(value: float, *at: int) -> Callable[[torch.Tensor], torch.Tensor]:
    def make(old: torch.Tensor) -> torch.Tensor:
        new = old.clone()
        new[at] = value
        return new

    return make


# What is damaged, where it must be found, and what the finding must name.
DAMAGES: list[tuple[str, Damage, str, tuple[str, ...]]] = [
    ("cut by a byte", truncate(1), "files", ("model-00002", "cut off")),
    ("cut to 7 bytes", lambda f: os.truncate(shards_of(f)[0], 7), "files", ("7 bytes",)),
    ("a byte too many", append, "files", ("after its last tensor",)),
    ("an LFS pointer", pointer, "files", ("Git LFS pointer",)),
    ("a shard is gone", lambda f: shards_of(f)[0].unlink(), "files", ("model-00001", "not there")),
    (
        "a shard too many",
        lambda f: shutil.copy(shards_of(f)[0], f / "model-00009-of-000009.safetensors"),
        "files",
        ("model-00009", "not named"),
    ),
    ("a tensor twice", second_copy, "files", ("in both",)),
    ("not in its shard", index(ghost="model-00001-of-000002.safetensors"), "files", ("ghost",)),
    ("a path escape", index(ghost="../model-1.safetensors"), "files", ("plain name",)),
    ("no index", lambda f: (f / INDEX).unlink(), "files", (INDEX,)),
    ("not an index", lambda f: (f / INDEX).write_text("{}"), "files", ("weight_map",)),
    ("config no JSON", lambda f: (f / "config.json").write_text("{"), "config", ("config.json",)),
    ("another group size", group_size(16), "config", ("group_size", "16")),
    ("one layer more", text(num_hidden_layers=7), "config", ("layers",)),
    ("more experts", text(num_experts=9), "tensors", ("experts.8.",)),
    ("an expert too many", text(num_experts=7), "tensors", ("experts.7.",)),
    ("no final norm", tensor("model.norm.weight", lambda t: None), "tensors", ("missing",)),
    ("no scale", tensor(SCALE, lambda t: None), "tensors", (SCALE, "missing")),
    ("a group short", tensor(SCALE, lambda t: t[:, :0]), "tensors", (SCALE, "group size 32")),
    ("scales as int8", tensor(SCALE, lambda t: t.to(torch.int8)), "tensors", (SCALE, "I8")),
    ("another shape", tensor("lm_head.weight", lambda t: t[:-1]), "tensors", ("lm_head", "511")),
    ("another dtype", tensor("lm_head.weight", lambda t: t.half()), "tensors", ("F16",)),
    ("a scale of 255", tensor(SCALE, put(255, 5, 0)), "values", (SCALE, "255", "[5, 0]")),
    ("NaN", tensor("3.self_attn.o_proj.weight", put(float("nan"), 7, 3)), "values", ("[7, 3]",)),
    ("infinity", tensor("layers.0.self_attn.dt_bias", put(float("inf"), 9)), "values", ("[9]",)),
    ("padding in use", tensor("layers.0.self_attn.A_log", put(1, -1)), "values", ("zero",)),
    (
        "tokenizer line",
        lambda f: (f / "tiktoken.model").write_text("AA== 5\n"),
        "tokenizer",
        ("tiktoken.model:1",),
    ),
]  # fmt: skip


@pytest.mark.parametrize(
    ("damage", "check", "needles"), [case[1:] for case in DAMAGES], ids=[c[0] for c in DAMAGES]
)
def test_damage_is_found_and_named(
    folder: Path, damage: Damage, check: str, needles: tuple[str, ...]
) -> None:
    damage(folder)
    report = run(folder)
    assert report["exit_code"] == ExitCode.BAD_CHECKPOINT and report["outcome"] == "broken"
    told = [one for one in found(report) if one["check"] == check]
    assert told, report["findings"]
    assert any(all(needle in one["text"] for needle in needles) for one in told), told
    # One cause, one kind of finding: a cut shard is not also 100 missing tensors.
    assert {one["check"] for one in found(report)} == {check}
    # Only the values themselves need the weights to be read.
    assert run(folder, "--quick")["exit_code"] == (0 if check == "values" else 4)


def test_findings_say_what_was_expected(folder: Path) -> None:
    change_tensors(folder, replace("lm_head.weight", lambda old: old[:-1].half()))
    name = "language_model.lm_head.weight"
    shape, dtype = sorted(found(run(folder)), key=lambda one: one["expected"], reverse=True)
    assert {shape["tensor"], dtype["tensor"]} == {name}
    assert shape["file"] == shard_with(folder, name).name
    assert (shape["expected"], shape["found"]) == ("shape [512, 64]", "shape [511, 64]")
    assert (dtype["expected"], dtype["found"]) == ("dtype BF16 or F32", "dtype F16")


def test_everything_is_found_in_one_run(folder: Path) -> None:
    change_tensors(folder, replace(SCALE, put(255, 0, 0)))
    change_tensors(folder, replace("layers.1.self_attn.dt_bias", put(float("nan"), 0)))
    change_tensors(folder, replace("layers.3.self_attn.o_proj.weight", lambda old: None))
    assert {one["check"] for one in found(run(folder))} == {"tensors", "values"}
    assert len(found(run(folder))) == 3


SUSPECTS: list[tuple[str, Damage, str, str]] = [
    ("a tensor of zeros", tensor("3.self_attn.o_proj.weight", torch.zeros_like), "values", "zero"),
    ("a hole", tensor("model.layers.1.block_sparse_moe.routed_expert_up_proj.weight",
                      lambda t: torch.cat([torch.zeros_like(t[:64]), t[64:]])), "values", "zero"),
    ("huge", tensor("3.self_attn.o_proj.weight", put(3e5, 0, 0)), "values", "largest"),
    ("huge scale", tensor(SCALE, put(250, 0, 0)), "values", "unusual scales"),
    ("no scales", tensor(SCALE, torch.zeros_like), "values", "every scale is zero"),
    ("a row", tensor(SCALE, put(0, 1)), "values", "1 rows"),
    ("claimed plain", text(quantization_config=None), "tensors", "the files hold"),
    ("no end id", text(eos_token_id=None), "config", "no file declares an end id"),
    ("total_size", lambda f: change_json(f / INDEX, lambda i: i["metadata"].update(total_size=1)),
     "files", "total_size"),
    ("no tokenizer", lambda f: (f / "tiktoken.model").unlink(), "tokenizer", "token ids only"),
    ("no markers", lambda f: (f / "tokenizer_config.json").unlink(), "tokenizer", "chat markers"),
    ("other end", lambda f: (f / "generation_config.json").write_text('{"eos_token_id": 65}'),
     "config", "ends answers at [65]"),
    ("ordinary end", lambda f: (f / "generation_config.json").write_text('{"eos_token_id": 65}'),
     "tokenizer", "'A'"),
    ("long", lambda f: (f / "generation_config.json").write_text('{"max_length": 9999}'),
     "config", "4096 positions"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("damage", "check", "needle"), [case[1:] for case in SUSPECTS], ids=[c[0] for c in SUSPECTS]
)
def test_what_only_looks_wrong_is_a_warning(
    folder: Path, damage: Damage, check: str, needle: str
) -> None:
    if needle == "no file declares an end id":
        change_json(folder / "config.json", lambda raw: raw.pop("eos_token_id", None))
    damage(folder)
    report = run(folder)
    assert report["exit_code"] == 0 and not found(report)
    told = [one["text"] for one in found(report, "warning") if one["check"] == check]
    assert any(needle in one for one in told), report["findings"]


def test_a_turn_that_would_run_on(folder: Path) -> None:
    ids = read_json(folder / "config.json")
    ids["eos_token_id"] = ids["text_config"]["eos_token_id"] = 257  # [EOS], not the message's end
    (folder / "config.json").write_text(json.dumps(ids))
    assert any("turns will run on" in one["text"] for one in found(run(folder), "warning"))


def test_pieces_of_a_file_add_up(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the size of the pieces, the same is found at the same places."""
    change_tensors(folder, replace(SCALE, put(255, 5, 0)))
    change_tensors(folder, replace("3.self_attn.o_proj.weight", put(float("nan"), 60, 3)))
    shutil.copytree(folder, other := folder.parent / "other")
    whole = run(folder, "--write-manifest", folder.parent / "whole.json")["findings"]
    monkeypatch.setattr(contents, "PIECE", contents.PAGE)
    assert run(other, "--threads", 1)["findings"] == whole
    listed = folder.parent / "listed.sha256"
    listed.write_text(sha256_lines(other))
    assert all(one["check"] != "manifest" for one in run(other, "--manifest", listed)["findings"])


def sha256_lines(folder: Path) -> str:
    return "".join(
        f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.name}\n"
        for path in sorted(folder.iterdir())
        if path.is_file()
    )


def hub_model(folder: Path) -> str:
    siblings: list[dict[str, Any]] = []
    for path in sorted(folder.iterdir()):
        data = path.read_bytes()
        entry: dict[str, Any] = {"rfilename": path.name, "size": len(data)}
        if path.suffix == ".safetensors":
            entry["lfs"] = {"sha256": hashlib.sha256(data).hexdigest(), "size": len(data)}
        else:
            entry["blobId"] = hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()
        siblings.append(entry)
    return json.dumps({"id": "moonshotai/Kimi-K3", "siblings": siblings})


def hub_tree(folder: Path) -> str:
    entries: list[dict[str, Any]] = [{"type": "directory", "path": "assets", "oid": "0" * 40}]
    for one in json.loads(hub_model(folder))["siblings"]:
        large = one.get("lfs")
        entries.append(
            {"type": "file", "path": one["rfilename"], "size": one["size"]}
            | ({"oid": one["blobId"]} if large is None else {})
            | ({"lfs": {"oid": large["sha256"], "size": large["size"]}} if large else {})
        )
    return json.dumps(entries)


def tagged(folder: Path) -> str:
    return re.sub(r"(\w+)  (.*)", r"SHA256 (\2) = \1", sha256_lines(folder))


class TestManifest:
    @pytest.mark.parametrize("form", [sha256_lines, tagged, hub_model, hub_tree])
    def test_published_forms(
        self, folder: Path, tmp_path: Path, form: Callable[[Path], str]
    ) -> None:
        (manifest := tmp_path / "manifest").write_text(form(folder))
        assert run(folder, "--manifest", manifest)["findings"] == []
        self.damage_one(folder)
        report = run(folder, "--manifest", manifest)
        assert report["exit_code"] == ExitCode.DIFFERS
        (one,) = found(report)
        assert (one["check"], one["file"]) == ("manifest", "tokenizer_config.json")

    @pytest.mark.parametrize("algorithm", ["sha256", "blake3", "xxh3"])
    def test_a_written_one_is_read_back(self, folder: Path, tmp_path: Path, algorithm: str) -> None:
        manifest = folder / "MANIFEST"
        run(folder, "--write-manifest", manifest, "--algorithm", algorithm)
        listed = json.loads(manifest.read_text())["files"]
        assert set(listed) == {path.name for path in folder.iterdir()} - {"MANIFEST"}
        assert run(folder, "--manifest", manifest)["outcome"] == "clean"
        # A value changed in place, too small for any other check.
        change = replace("lm_head.weight", put(0.125, 0, 0))
        change_tensors(folder, change)
        report = run(folder, "--manifest", manifest)
        assert report["outcome"] == "differs from the manifest"
        shard = shard_with(folder, "lm_head.weight").name
        assert shard in {one["file"] for one in found(report)}

    def damage_one(self, folder: Path) -> None:
        path = folder / "tokenizer_config.json"
        path.write_text(path.read_text().replace('"lstrip": false', '"lstrip": true ', 1))

    def test_quick_compares_names_and_sizes(self, folder: Path, tmp_path: Path) -> None:
        (manifest := tmp_path / "manifest").write_text(hub_model(folder))
        self.damage_one(folder)
        assert run(folder, "--manifest", manifest, "--quick")["outcome"] == "clean"
        (folder / "tokenizer_config.json").write_text("{}")
        report = run(folder, "--manifest", manifest, "--quick")
        assert [one["found"] for one in found(report)] == ["2 bytes"]

    def test_files_too_few_and_too_many(self, folder: Path, tmp_path: Path) -> None:
        (manifest := tmp_path / "manifest").write_text(sha256_lines(folder))
        (folder / "tokenizer_config.json").rename(folder / "modeling.py")
        report = run(folder, "--manifest", manifest)
        assert [one["file"] for one in found(report)] == ["tokenizer_config.json"]
        extra = [one["file"] for one in found(report, "warning") if one["check"] == "manifest"]
        assert extra == ["modeling.py"]

    def test_what_a_model_can_do_without(self, folder: Path, tmp_path: Path) -> None:
        (folder / ".gitattributes").write_text("* text\n")
        (folder / "figures").mkdir()
        (folder / "figures" / "a.png").write_bytes(b"png")
        whole = [*sha256_lines(folder).splitlines(), f"{'0' * 64}  figures/a.png"]
        (manifest := tmp_path / "manifest").write_text("\n".join(whole))
        (told,) = found(run(folder, "--manifest", manifest))  # hidden, but listed: no complaint
        assert told["file"] == "figures/a.png" and told["expected"] == "0" * 64
        (folder / "figures" / "a.png").unlink()
        report = run(folder, "--manifest", manifest)
        assert report["outcome"] == "clean"
        assert [one["file"] for one in found(report, "warning")] == ["figures/a.png"]

    def test_broken_weighs_more_than_different(self, folder: Path, tmp_path: Path) -> None:
        (manifest := tmp_path / "manifest").write_text(sha256_lines(folder))
        change_tensors(folder, replace(SCALE, put(255, 0, 0)))
        report = run(folder, "--manifest", manifest)
        assert report["exit_code"] == ExitCode.BAD_CHECKPOINT
        assert {one["check"] for one in found(report)} == {"values", "manifest"}

    def test_a_broken_model_gets_no_manifest(self, folder: Path, tmp_path: Path) -> None:
        truncate(1)(folder)
        assert run(folder, "--write-manifest", tmp_path / "new")["exit_code"] == 4
        assert not (tmp_path / "new").exists()

    @pytest.mark.parametrize(
        ("content", "needle"),
        [
            ("", "lists no file"),
            ("banana", "line 1"),
            (f"{'0' * 64}  ../../etc/passwd", "out of the folder"),
            (f"{'0' * 64}  /etc/passwd", "out of the folder"),
            (f"{'0' * 40}  config.json", "64 hex digits"),
            (f"{'0' * 64}  a\n{'0' * 64}  a", "listed twice"),
            ("{}", "neither"),
            ("[" * 100_000, "recursion"),
            ('{"siblings": [{"rfilename": "a", "size": -1}]}', "size"),
            ('{"format": "other", "algorithm": "sha256", "files": {}}', "format"),
            ('{"format": "expertmesh-manifest-1", "algorithm": "md5", "files": {}}', "md5"),
            ('{"format": "expertmesh-manifest-1", "algorithm": "sha256", "files": {"a": {"size": 1,'
             ' "digest": "zz"}}}', "files.a"),
        ],
    )  # fmt: skip
    def test_bad_manifests_are_refused(
        self, tiny: Path, tmp_path: Path, content: str, needle: str
    ) -> None:
        (manifest := tmp_path / "manifest").write_text(content)
        done = CliRunner().invoke(app, ["verify", str(tiny), "--manifest", str(manifest)])
        assert done.exit_code == ExitCode.USAGE
        assert needle in done.stderr and len(done.stderr) < 1000


def test_small_files_that_were_not_fetched(folder: Path) -> None:
    content = "version https://git-lfs.github.com/spec/v1\noid sha256:0a\nsize 1\n"
    (folder / "tiktoken.model").write_text(content)
    told = {one["check"]: one for one in found(run(folder, "--quick"))}
    assert told["files"]["file"] == "tiktoken.model" and "LFS" in told["files"]["text"]


def test_a_shard_that_is_no_file(folder: Path) -> None:
    (shard := shards_of(folder)[0]).unlink()
    os.mkfifo(shard)  # opening it would wait for a writer
    (told,) = found(run(folder))
    assert told["file"] == shard.name and told["expected"] == "a file"


def test_wrong_usage_and_no_model(tiny: Path, tmp_path: Path) -> None:
    def code(*arguments: object) -> int:
        return CliRunner().invoke(app, ["verify", *map(str, arguments)]).exit_code

    assert code(tmp_path / "nowhere") == ExitCode.NO_MODEL
    assert code(tmp_path) == ExitCode.NO_MODEL
    assert code(tiny, "--quick", "--write-manifest", tmp_path / "x") == ExitCode.USAGE
    assert code(tiny, "--algorithm", "md5", "--write-manifest", tmp_path / "x") == ExitCode.USAGE
    assert code(tiny, "--manifest", tmp_path / "none") == ExitCode.USAGE
    assert code(tiny, "--write-manifest", tmp_path / "no" / "x") == ExitCode.USAGE


def test_the_hub_cache_is_followed_and_nothing_is_written(folder: Path, tmp_path: Path) -> None:
    blobs, snapshot = tmp_path / "blobs", tmp_path / "snapshots" / "main"
    blobs.mkdir()
    snapshot.mkdir(parents=True)
    for number, path in enumerate(sorted(folder.iterdir())):
        path.rename(blobs / f"{number}")
        (snapshot / path.name).symlink_to(Path("../../blobs") / f"{number}")
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    assert run(snapshot)["outcome"] == "clean"
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")} == before


def test_a_terminal_gets_a_table_cut_to_ten(folder: Path) -> None:
    text(num_experts=12)(folder)
    done = CliRunner().invoke(app, ["verify", str(folder)])
    assert done.exit_code == ExitCode.BAD_CHECKPOINT
    assert "broken: 130 errors" in done.stdout and "and 120 more" in done.stdout
