"""A checkpoint on disk: validated as a whole from its headers, then read tensor by tensor.

Names are without the family prefix: "model.layers.3.self_attn.o_proj.weight", "lm_head.weight".
Nothing is ever written into the folder, and only the bytes of the tensors asked for are read.
"""

import os
import threading
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import torch
from torch import Tensor

from expertmesh.actors.model.config import ModelConfig
from expertmesh.actors.model.problems import CheckpointError
from expertmesh.actors.model.progress import LoadMeter, LoadProgress
from expertmesh.actors.model.shard import ReadMode, Shard, ShardReader
from expertmesh.actors.model.shard_set import open_shards
from expertmesh.actors.model.summary import CheckpointSummary, summarize
from expertmesh.actors.model.tensors import expert_prefix, expert_shapes
from expertmesh.actors.model.validate import Inventory, take_inventory

__all__ = ["Checkpoint", "CheckpointError", "ExpertWeights", "LoadProgress", "PackedMatrix"]

# Sequential reads of neighbouring tensors are joined up to this size: large enough to stream, small
# enough that a view into the block keeps little else alive.
_JOIN_BYTES = 256 << 20


@dataclass(frozen=True, slots=True)
class PackedMatrix:
    """An mxfp4 matrix [rows, K]: packed uint8 [rows, K/2] (low nibble first) and scale uint8
    [rows, K/32] (exponent + 127; 255 has been refused)."""

    packed: Tensor
    scale: Tensor

    @property
    def nbytes(self) -> int:
        """Bytes of both tensors."""
        return self.packed.nbytes + self.scale.nbytes


@dataclass(frozen=True, slots=True)
class ExpertWeights:
    """One routed expert: w1 = gate [I, D], w2 = down [D, I], w3 = up [I, D]."""

    w1: PackedMatrix | Tensor
    w2: PackedMatrix | Tensor
    w3: PackedMatrix | Tensor

    @property
    def nbytes(self) -> int:
        """Bytes as stored."""
        return self.w1.nbytes + self.w2.nbytes + self.w3.nbytes


class Checkpoint:
    """Use `Checkpoint.open`."""

    def __init__(
        self, folder: Path, config: ModelConfig, shards: list[Shard], mode: ReadMode
    ) -> None:
        self.folder = folder
        self.config = config
        self._inventory: Inventory = take_inventory(config, shards)
        self._readers = {s.path: ShardReader(s, mode, self._count) for s in shards}
        self._bytes_read = 0
        self._lock = threading.Lock()

    @classmethod
    def open(cls, folder: str | Path, config: ModelConfig, *, read_mode: ReadMode = "mmap") -> Self:
        """Read the headers of all shards and check them against each other and `config`.

        read_mode "sequential" reads whole ranges in large requests, for network disks, where page
        faults on a map take minutes. Raises CheckpointError naming file, tensor and what differs.
        """
        if read_mode not in ("mmap", "sequential"):
            raise ValueError(f"read_mode: {read_mode!r} is not one of mmap, sequential")
        folder = Path(folder)
        try:
            return cls(folder, config, open_shards(folder), read_mode)
        except CheckpointError as error:
            raise CheckpointError(f"{folder}: {error}") from error

    @property
    def bytes_read(self) -> int:
        """Bytes of all tensors handed out so far."""
        return self._bytes_read

    def names_for_attention(self) -> tuple[str, ...]:
        """Everything but the routed experts, in model order."""
        return tuple(self._inventory.attention)

    def names_for_experts(self, layer: int, ids: Iterable[int]) -> tuple[str, ...]:
        """The tensors of the routed experts `ids` of `layer`."""
        return tuple(name for expert in ids for name in self._expert_names(layer, expert))

    def nbytes(self, names: Iterable[str]) -> int:
        """Stored bytes of `names`."""
        return sum(self._inventory.entry(name).nbytes for name in names)

    def tensor(self, name: str) -> Tensor:
        """One tensor as stored; `A_log` always as [heads]. KeyError for an unknown name.

        In mmap mode this is a view of the file: copy what has to be there without a page fault.
        """
        shard, full = self._inventory.where[name]
        return self._finish(name, self._readers[shard.path].tensors([full])[0])

    def stream(
        self, names: Iterable[str], progress: LoadProgress | None = None
    ) -> Iterator[tuple[str, Tensor]]:
        """`names` in file order, neighbours joined into large reads."""
        meter = LoadMeter(self.nbytes(names := list(names)), progress)
        for group in self._runs(names):
            for name, tensor in zip(group, self._read(group), strict=True):
                yield name, self._finish(name, tensor)
                meter.add(tensor.nbytes)
        meter.finish()

    def expert(self, layer: int, expert: int) -> ExpertWeights:
        """One routed expert, as stored. Refuses a scale byte 255 (NaN), naming tensor and index."""
        names = self._expert_names(layer, expert)
        found = dict(zip(names, self._read(names), strict=True))
        matrices = {
            matrix: self._matrix(f"{expert_prefix(layer, expert)}{matrix}", found)
            for matrix in expert_shapes(self.config)
        }
        return ExpertWeights(**matrices)

    def stream_experts(
        self, placed: Mapping[int, Iterable[int]], progress: LoadProgress | None = None
    ) -> Iterator[tuple[int, int, ExpertWeights]]:
        """(layer, expert, weights) of the experts `placed` by layer, in file order."""
        wanted = [(layer, expert) for layer, ids in placed.items() for expert in ids]
        wanted.sort(key=lambda pair: self._position(self._expert_names(*pair)[0]))
        total = sum(self.nbytes(self._expert_names(*pair)) for pair in wanted)
        meter = LoadMeter(total, progress)
        for layer, expert in wanted:
            weights = self.expert(layer, expert)
            yield layer, expert, weights
            meter.add(weights.nbytes)
        meter.finish()

    def summary(self) -> CheckpointSummary:
        """Counts and bytes by part and dtype, from the headers."""
        return summarize(self._inventory, list(self._readers))

    def close(self) -> None:
        """Drop the maps; tensors handed out stay valid."""
        for reader in self._readers.values():
            reader.close()

    def _count(self, nbytes: int) -> None:
        with self._lock:
            self._bytes_read += nbytes

    def _expert_names(self, layer: int, expert: int) -> list[str]:
        prefix, names = expert_prefix(layer, expert), []
        for matrix in expert_shapes(self.config):
            if (layer, expert, matrix) in self._inventory.packed:
                names += [f"{prefix}{matrix}.weight_packed", f"{prefix}{matrix}.weight_scale"]
            else:
                names.append(f"{prefix}{matrix}.weight")
        return names

    def _position(self, name: str) -> tuple[str, int]:
        shard, full = self._inventory.where[name]
        return os.fspath(shard.path), shard.entries[full].begin

    def _runs(self, names: Iterable[str]) -> Iterator[list[str]]:
        """`names` in file order, cut where the shard changes or `_JOIN_BYTES` is reached."""
        group: list[str] = []
        size, last = 0, None
        for name in sorted(names, key=self._position):
            shard, _ = self._inventory.where[name]
            nbytes = self._inventory.entry(name).nbytes
            if group and (shard is not last or size + nbytes > _JOIN_BYTES):
                yield group
                group, size = [], 0
            group.append(name)
            size, last = size + nbytes, shard
        if group:
            yield group

    def _read(self, names: list[str]) -> list[Tensor]:
        """The tensors `names` in that order, one request per shard."""
        by_shard: dict[Path, list[str]] = {}
        for name in names:
            by_shard.setdefault(self._inventory.where[name][0].path, []).append(name)
        found: dict[str, Tensor] = {}
        for path, group in by_shard.items():
            full = [self._inventory.where[name][1] for name in group]
            found |= dict(zip(group, self._readers[path].tensors(full), strict=True))
        return [found[name] for name in names]

    def _matrix(self, name: str, found: Mapping[str, Tensor]) -> PackedMatrix | Tensor:
        packed = found.get(f"{name}.weight_packed")
        if packed is None:
            return found[f"{name}.weight"]
        scale = found[f"{name}.weight_scale"]
        if bool((scale == 255).any()):
            row, group = (scale == 255).nonzero()[0].tolist()
            shard, full = self._inventory.where[f"{name}.weight_scale"]
            raise CheckpointError(
                f"{full} in {shard.path.name}: scale byte 255 (NaN) at [{row}, {group}]"
            )
        return PackedMatrix(packed, scale)

    def _finish(self, name: str, tensor: Tensor) -> Tensor:
        if not name.endswith(".A_log"):
            return tensor
        flat = tensor.reshape(-1)
        heads = self.config.kda_heads
        if bool(torch.count_nonzero(flat[heads:])):
            shard, full = self._inventory.where[name]
            raise CheckpointError(
                f"{full} in {shard.path.name}: {heads} heads, but the values after the first "
                f"{heads} are not all zero padding",
                file=shard.path.name,
                tensor=full,
                expected=f"zeros after the first {heads} values",
                found="other values",
            )
        return flat[:heads]
