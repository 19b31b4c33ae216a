"""Only the needed bytes are read, in large requests where asked for, and counted (C15)."""

import json
import os
import shutil
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import psutil
import pytest
import torch

from expertmesh.actors.model.checkpoint import Checkpoint, CheckpointError, PackedMatrix
from expertmesh.actors.model.config import load_config
from expertmesh.actors.model.progress import LoadMeter
from expertmesh.actors.model.shard import ShardReader, read_shard
from tests.support.checkpoints import write_checkpoint


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(
        tmp_path_factory.mktemp("reads"), shards=3, experts="mixed", moe_intermediate_size=96
    )


class Reads:
    """Records every data read, and can make each one slow."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, seconds: float = 0) -> None:
        self.ranges: list[tuple[str, int, int]] = []
        real = os.preadv

        def preadv(descriptor: int, buffers: Sequence[memoryview], offset: int) -> int:
            time.sleep(seconds)
            got = real(descriptor, buffers, offset)
            name = Path(os.readlink(f"/proc/self/fd/{descriptor}")).name
            self.ranges.append((name, offset, offset + got))
            return got

        monkeypatch.setattr(os, "preadv", preadv)

    @property
    def nbytes(self) -> int:
        return sum(end - begin for _, begin, end in self.ranges)


def sequential(folder: Path) -> Checkpoint:
    return Checkpoint.open(folder, load_config(folder), read_mode="sequential")


def places(checkpoint: Checkpoint, names: Sequence[str]) -> list[tuple[str, int, int]]:
    found = []
    for name in names:
        entry = checkpoint._inventory.entry(name)
        shard, _ = checkpoint._inventory.where[name]
        found.append((shard.path.name, entry.begin, entry.end))
    return found


def covered(ranges: list[tuple[str, int, int]]) -> set[tuple[str, int]]:
    return {(file, byte) for file, begin, end in ranges for byte in range(begin, end)}


def test_opening_reads_no_data(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reads = Reads(monkeypatch)
    assert sequential(folder).bytes_read == 0
    assert reads.ranges == []


def test_an_expert_reader_touches_its_experts_only(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reads = Reads(monkeypatch)
    checkpoint = sequential(folder)
    placed = {1: [0, 5], 4: [2]}
    found = list(checkpoint.stream_experts(placed))
    assert sorted((layer, expert) for layer, expert, _ in found) == [(1, 0), (1, 5), (4, 2)]
    names = [n for layer, ids in placed.items() for n in checkpoint.names_for_experts(layer, ids)]
    assert covered(reads.ranges) == covered(places(checkpoint, names))
    assert reads.nbytes == checkpoint.bytes_read == checkpoint.nbytes(names)


def test_an_attention_reader_touches_no_expert(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reads = Reads(monkeypatch)
    checkpoint = sequential(folder)
    names = checkpoint.names_for_attention()
    for _ in checkpoint.stream(names):
        pass
    assert covered(reads.ranges) == covered(places(checkpoint, names))
    assert reads.nbytes == checkpoint.summary().attention.total_bytes


def test_both_modes_give_the_same_bits(folder: Path) -> None:
    mapped, read = Checkpoint.open(folder, load_config(folder)), sequential(folder)
    streamed = dict(read.stream(reversed(read.names_for_attention())))
    for name in mapped.names_for_attention():
        assert torch.equal(mapped.tensor(name), streamed[name])
        assert torch.equal(mapped.tensor(name), read.tensor(name))
    for layer in mapped.config.moe_layers:
        for expert in range(8):
            a, b = mapped.expert(layer, expert), read.expert(layer, expert)
            for x, y in ((a.w1, b.w1), (a.w2, b.w2), (a.w3, b.w3)):
                if isinstance(x, PackedMatrix):
                    assert isinstance(y, PackedMatrix)
                    assert torch.equal(x.packed, y.packed)
                    assert torch.equal(x.scale, y.scale)
                else:
                    assert isinstance(y, torch.Tensor)
                    assert torch.equal(x, y)
    assert mapped.bytes_read > 0


def test_four_readers_of_a_slow_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """5 ms per request, as a network file system has: few requests, each rank near its share."""
    folder = write_checkpoint(tmp_path, shards=3)
    reads = Reads(monkeypatch, seconds=0.005)
    total = 0
    for rank in range(4):
        checkpoint = sequential(folder)
        placed = {i: range(rank * 2, rank * 2 + 2) for i in checkpoint.config.moe_layers}
        for _ in checkpoint.stream_experts(placed):
            pass
        total += checkpoint.bytes_read
        assert len(reads.ranges) == (rank + 1) * len(placed) * 2  # one request per expert
    assert total == reads.nbytes == checkpoint.summary().experts.total_bytes
    reads.ranges.clear()
    for _ in checkpoint.stream(checkpoint.names_for_attention()):
        pass
    tensors = len(checkpoint.names_for_attention())
    assert len(reads.ranges) < tensors / 4  # neighbours are joined


def test_mapped_tensors_are_views_of_the_file(folder: Path) -> None:
    checkpoint = Checkpoint.open(folder, load_config(folder))
    names = [f"model.layers.0.mlp.{kind}_proj.weight" for kind in ("gate", "up")]
    (file_a, begin_a, _), (file_b, begin_b, _) = places(checkpoint, names)
    assert file_a == file_b
    a, b = (checkpoint.tensor(name) for name in names)
    assert a.data_ptr() - b.data_ptr() == begin_a - begin_b
    kept = a.clone()
    checkpoint.close()
    assert torch.equal(a, kept)


@pytest.mark.parametrize("mode", ["mmap", "sequential"])
def test_an_odd_number_of_bytes_before_a_float_tensor(tmp_path: Path, mode: str) -> None:
    """Alignment inside a shard is a convention, not part of the format."""
    folder = write_checkpoint(tmp_path, shards=1)
    path = folder / "model.safetensors"
    content = path.read_bytes()
    length = int.from_bytes(content[:8], "little")
    header = content[8 : 8 + length].rstrip() + b" "
    header += b" " * (1 - len(header) % 2)  # an odd header
    path.write_bytes(len(header).to_bytes(8, "little") + header + content[8 + length :])
    reference = Checkpoint.open(write_checkpoint(tmp_path / "even"), load_config(folder))
    checkpoint = Checkpoint.open(folder, load_config(folder), read_mode=mode)  # type: ignore[arg-type]
    for name in checkpoint.names_for_attention():
        assert torch.equal(checkpoint.tensor(name), reference.tensor(name))


def test_a_file_that_shrinks_while_it_is_read(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path, shards=1)
    checkpoint = sequential(folder)
    os.truncate(folder / "model.safetensors", 50_000)
    with pytest.raises(CheckpointError, match="became shorter"):
        for _ in checkpoint.stream(checkpoint.names_for_attention()):
            pass


def test_threads_may_share_a_checkpoint(folder: Path) -> None:
    checkpoint = Checkpoint.open(folder, load_config(folder))
    names = checkpoint.names_for_attention()
    failures: list[Exception] = []

    def read() -> None:
        try:
            for name in names:
                checkpoint.tensor(name).sum()
        except Exception as error:
            failures.append(error)

    threads = [threading.Thread(target=read) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    assert checkpoint.bytes_read == 4 * checkpoint.nbytes(names)


def test_progress_reaches_the_total(folder: Path) -> None:
    checkpoint = Checkpoint.open(folder, load_config(folder))
    reports: list[tuple[int, int, float]] = []

    def note(done: int, total: int, bytes_per_second: float) -> None:
        reports.append((done, total, bytes_per_second))

    names = checkpoint.names_for_attention()
    for _ in checkpoint.stream(names, note):
        pass
    done, total, rate = reports[-1]
    assert done == total == checkpoint.nbytes(names)
    assert rate > 0
    reports.clear()
    for _ in checkpoint.stream_experts({1: range(8)}, note):
        pass
    assert (
        reports[-1][0]
        == reports[-1][1]
        == checkpoint.nbytes(checkpoint.names_for_experts(1, range(8)))
    )


def test_progress_is_not_called_for_every_tensor() -> None:
    calls: list[int] = []
    meter = LoadMeter(100, lambda done, total, bytes_per_second: calls.append(done))
    for _ in range(100):
        meter.add(1)
    meter.finish()
    assert calls == [100]


def test_an_unknown_name_or_mode(folder: Path) -> None:
    checkpoint = Checkpoint.open(folder, load_config(folder))
    with pytest.raises(KeyError):
        checkpoint.tensor("model.layers.99.nothing")
    with pytest.raises(KeyError):
        checkpoint.expert(1, 8)
    with pytest.raises(ValueError, match="read_mode"):
        Checkpoint.open(folder, load_config(folder), read_mode="direct")  # type: ignore[arg-type]


def test_a_renamed_folder_keeps_its_open_map(folder: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(folder, tmp_path / "a"))
    checkpoint = Checkpoint.open(copy, load_config(copy))
    weight = checkpoint.tensor("lm_head.weight")
    total = weight.float().sum()
    copy.rename(tmp_path / "b")
    assert weight.float().sum() == total


def test_a_shard_larger_than_main_memory_can_be_mapped(tmp_path: Path) -> None:
    """A private map without reservation; the file is sparse, so the disk need not be large."""
    rows = 2 * psutil.virtual_memory().total >> 12
    header = {"x": {"dtype": "U8", "shape": [rows, 4096], "data_offsets": [0, rows << 12]}}
    raw = json.dumps(header).encode()
    path = tmp_path / "model.safetensors"
    with path.open("wb") as file:
        file.write(len(raw).to_bytes(8, "little") + raw)
        try:
            file.truncate(8 + len(raw) + (rows << 12))
        except OSError:
            pytest.skip("the file system has no sparse files of this size")
    reader = ShardReader(read_shard(path), "mmap", lambda nbytes: None)
    assert int(reader.tensors(["x"])[0][-1].sum()) == 0
