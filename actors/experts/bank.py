"""The experts one process holds: packed in memory, decoded on the way into the GEMM."""

import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from expertmesh.actors.experts.decoded import Decoded, DecodedCache, Key, decode
from expertmesh.actors.experts.digests import Digests, derived_digest, packed_digest
from expertmesh.actors.experts.tables import LayerTables
from expertmesh.actors.model.checkpoint import CheckpointError, ExpertWeights, PackedMatrix
from expertmesh.actors.model.config import ModelConfig
from expertmesh.kernels.latent_moe.tables import ExpertTable
from expertmesh.kernels.latent_moe.types import Glu
from expertmesh.kernels.linear.half import HalfMatrix
from expertmesh.kernels.registry import Kernels


class ExpertNotHeld(LookupError):
    """Somebody asked for an expert that is not here. Never answered with another one's numbers."""

    def __init__(self, layer: int, expert: int) -> None:
        super().__init__(f"layer {layer}: expert {expert} is not held here")
        self.layer, self.expert = layer, expert

    def __reduce__(self) -> tuple[type, tuple[int, int]]:
        # It travels between processes, and the default rebuilds from the message alone.
        return ExpertNotHeld, (self.layer, self.expert)


class ExpertSource(Protocol):
    def stream_experts(
        self, placed: Mapping[int, Iterable[int]]
    ) -> Iterator[tuple[int, int, ExpertWeights]]:
        """(layer, expert, weights), in the order they lie on disk."""
        ...


@dataclass(slots=True)
class Held:
    """One expert in memory, never changed. packed, derived: its digests when it came in; derived
    is None until somebody needed it."""

    weights: ExpertWeights
    packed: int
    derived: int | None = None


@dataclass(frozen=True, slots=True)
class Staged:
    """An expert that is complete here but that no step can see yet."""

    layer: int
    expert: int
    weights: ExpertWeights
    decoded: Decoded
    digests: Digests


class ExpertBank:
    """Experts by (layer, global expert id), with a bounded cache of decoded ones.

    Packed experts stay packed; at most `cache_bytes` of decoded copies are kept, least recently
    used first out. Experts may come and go in other threads while `partial_sum` runs.
    """

    def __init__(
        self,
        config: ModelConfig,
        kernels: Kernels,
        placed: Mapping[int, Iterable[int]],
        source: ExpertSource,
        *,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
        cache_bytes: int,
    ) -> None:
        """Reads the experts `placed` (layer -> experts). Raises CheckpointError."""
        self._kernels = kernels
        self._glu = glu_of(config)
        self._num_experts = config.num_experts
        width, inner = config.latent_size, config.moe_intermediate_size
        self._shapes = (2 * inner, width), (width, inner)  # of w13 and w2
        self._dtype = dtype
        self.device = torch.device(device)
        self._lock = threading.Lock()
        self._held: dict[Key, Held] = {}  # guarded by _lock for writing, like the next three
        self._ids: dict[int, Tensor] = {}  # layer -> see _nowhere
        self._cache = DecodedCache(cache_bytes)
        self._tables = LayerTables(
            kernels, experts=self._num_experts, inner=inner, dtype=dtype, device=self.device
        )
        self._packed_bytes = 0
        self.load(placed, source)

    @property
    def packed_bytes(self) -> int:
        return self._packed_bytes

    @property
    def cached_bytes(self) -> int:
        return self._cache.nbytes

    @property
    def count(self) -> int:
        """Experts held, of all layers."""
        return len(self._held)

    @property
    def sum_dtype(self) -> torch.dtype:
        """Of partial sums. float64 keeps a token's float32 result independent of how its experts
        are spread over banks: the order of the additions no longer reaches the last bit."""
        return torch.float64 if self._dtype == torch.float32 else torch.float32

    def holds(self, layer: int, expert: int) -> bool:
        return (layer, expert) in self._held

    def held(self) -> dict[int, tuple[int, ...]]:
        """layer -> its experts here, ascending; layers without any are absent."""
        with self._lock:
            keys = sorted(self._held)
        found: dict[int, list[int]] = {}
        for layer, expert in keys:
            found.setdefault(layer, []).append(expert)
        return {layer: tuple(experts) for layer, experts in found.items()}

    def local_ids(self, layer: int, ids_TK: Tensor) -> Tensor:
        """`ids_TK` with -1 in the place of experts that live elsewhere; -1 stays -1."""
        ids_E = self._ids.get(layer)
        return torch.full_like(ids_TK, -1) if ids_E is None else ids_E.take(ids_TK)

    def load(self, placed: Mapping[int, Iterable[int]], source: ExpertSource) -> None:
        """Adds experts from a checkpoint, all or none.

        Each is digested as it lies in the file and again as it arrived here, which costs 0.1 ms a
        megabyte: half of copying it out of the page cache, a tenth of reading it at 1 GB/s.
        Raises CheckpointError, and ValueError for one that is held already.
        """
        done: list[Key] = []
        try:
            for layer, expert, weights in source.stream_experts(placed):
                digest = packed_digest(layer, expert, weights)
                copy = _own(weights, self.device)
                if packed_digest(layer, expert, copy) != digest:
                    raise CheckpointError(f"layer {layer}: expert {expert} was damaged in memory")
                self._admit(layer, expert, Held(copy, digest))
                done.append((layer, expert))
        except BaseException:
            for key in done:
                self.drop(*key)
            raise

    def add(self, layer: int, expert: int, weights: ExpertWeights) -> None:
        """Holds an expert from now on; `weights` is kept, not copied. Raises ValueError if it is
        here already."""
        self._admit(layer, expert, Held(weights, packed_digest(layer, expert, weights)))

    def stage(self, layer: int, expert: int, weights: ExpertWeights) -> Staged:
        """Decodes and digests an expert without adding it. Raises ValueError for other shapes than
        this model's."""
        made = decode(self._kernels, weights, self._dtype)
        if (made.w13.shape, made.w2.shape) != self._shapes:
            raise ValueError(f"matrices {[*made.w13.shape]} and {[*made.w2.shape]}")
        packed = packed_digest(layer, expert, weights)
        digests = Digests(packed, derived_digest(layer, expert, made.dense()))
        return Staged(layer, expert, weights, made, digests)

    def admit(self, staged: Staged) -> None:
        """Holds it from now on, its decoded copy in the cache where copies are used: an expert that
        was moved here is wanted soon. Raises ValueError if it is here already."""
        held = Held(staged.weights, *staged.digests)
        copies = not self._tables.in_use
        self._admit(staged.layer, staged.expert, held)
        if copies:
            self._keep((staged.layer, staged.expert), held, staged.decoded)

    def drop(self, layer: int, expert: int) -> None:
        """Frees an expert, its decoded copy included. Raises ExpertNotHeld."""
        key = (layer, expert)
        with self._lock:
            held = self._held.pop(key, None)
            if held is None:
                raise ExpertNotHeld(layer, expert)
            self._cache.remove(key)
            self._packed_bytes -= held.weights.nbytes
            self._point(layer, expert, -1)

    def weights(self, layer: int, expert: int) -> tuple[Tensor, Tensor]:
        """Decoded (w13 [2I, D], w2 [D, I]) of one expert. Raises ExpertNotHeld."""
        w13, w2 = self.decoded(layer, expert).dense()
        return w13.to(self._dtype), w2.to(self._dtype)

    def decoded(self, layer: int, expert: int) -> Decoded:
        """One expert as the GEMM reads it. Raises ExpertNotHeld."""
        key = (layer, expert)
        hit = self._cache.get(key)
        if hit is None:
            held = self._find(layer, expert)
            hit = decode(self._kernels, held.weights, self._dtype)
            self._keep(key, held, hit)
        return hit

    def all_decoded(self, layer: int, experts: Sequence[int]) -> list[Decoded]:
        """`decoded` of each. Raises ExpertNotHeld."""
        hits = self._cache.get_all([(layer, expert) for expert in experts])
        return [
            hit or self.decoded(layer, expert) for hit, expert in zip(hits, experts, strict=True)
        ]

    def table(self, layer: int) -> ExpertTable:
        """What is held of a layer now, for kernels: its memory stays while somebody has it."""
        table = self._tables.get(layer)
        if table is None:
            with self._lock:
                experts = range(self._num_experts)
                found = ((expert, self._held.get((layer, expert))) for expert in experts)
                here = [(expert, held.weights) for expert, held in found if held is not None]
                table = self._tables.make(layer, here)
        return table

    def partial_sum(self, layer: int, z_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor) -> Tensor:
        """Weighted sum over the chosen experts, `sum_dtype` [T, D]; zero rows where there are none.

        ids_TK: global expert ids, -1 where another bank computes. Raises ExpertNotHeld where the
        host learns of it; a kernel on a GPU answers NaN.
        """
        return self._kernels.experts_partial_sum(
            z_TD,
            ids_TK,
            weights_TK,
            LayerExperts(self, layer),
            self._glu,
            sum_dtype=self.sum_dtype,
        )

    def checksum(self, layer: int, expert: int) -> int:
        """Over the bytes in memory now: packed and, where a decoded copy is kept, that copy.

        Raises ExpertNotHeld.
        """
        return self.digests(layer, expert).checksum(layer, expert)

    def digests(self, layer: int, expert: int) -> Digests:
        """Of the bytes in memory now, as `checksum`. Raises ExpertNotHeld."""
        held = self._find(layer, expert)
        packed = packed_digest(layer, expert, held.weights)
        kept = self._cache.peek((layer, expert))
        if kept is None:
            return Digests(packed, self._derived(layer, expert, held))
        return Digests(packed, derived_digest(layer, expert, kept.dense()))

    def stored(self, layer: int, expert: int) -> tuple[ExpertWeights, Digests]:
        """An expert with the digests it had when it came in. Raises ExpertNotHeld."""
        held = self._find(layer, expert)
        return held.weights, Digests(held.packed, self._derived(layer, expert, held))

    def _derived(self, layer: int, expert: int, held: Held) -> int:
        """Always from the packed bytes, never from the cached copy that it shall vouch for."""
        if held.derived is None:
            made = decode(self._kernels, held.weights, self._dtype)
            held.derived = derived_digest(layer, expert, made.dense())
        return held.derived

    def _find(self, layer: int, expert: int) -> Held:
        held = self._held.get((layer, expert))
        if held is None:
            raise ExpertNotHeld(layer, expert)
        return held

    def _admit(self, layer: int, expert: int, held: Held) -> None:
        with self._lock:
            if (layer, expert) in self._held:
                raise ValueError(f"layer {layer}: expert {expert} is held already")
            self._held[layer, expert] = held
            self._packed_bytes += held.weights.nbytes
            self._point(layer, expert, expert)

    def _point(self, layer: int, expert: int, entry: int) -> None:
        """A new table each time: whoever reads the old one sees it whole."""
        old = self._ids.get(layer)
        table = self._nowhere() if old is None else old.clone()
        table[expert] = entry
        self._ids[layer] = table
        self._tables.forget(layer)

    def _nowhere(self) -> Tensor:
        """int64 [E + 1]: the id of an expert that is here, else -1; the last entry answers -1."""
        return torch.full((self._num_experts + 1,), -1, dtype=torch.int64, device=self.device)

    def _keep(self, key: Key, held: Held, made: Decoded) -> None:
        with self._lock:
            if self._held.get(key) is held:  # not dropped while it was decoded
                self._cache.put(key, made)


@dataclass(frozen=True, slots=True)
class LayerExperts:
    """The experts of one layer, as the operator takes them."""

    bank: ExpertBank
    layer: int

    def __call__(self, expert: int) -> tuple[Tensor, Tensor]:
        return self.bank.weights(self.layer, expert)

    def matrices(
        self, experts: Sequence[int]
    ) -> list[tuple[Tensor | HalfMatrix, Tensor | HalfMatrix]]:
        return [(made.w13, made.w2) for made in self.bank.all_decoded(self.layer, experts)]

    def table(self) -> ExpertTable:
        return self.bank.table(self.layer)


def glu_of(config: ModelConfig) -> Glu:
    return Glu(config.glu_kind, config.situ_beta, config.situ_linear_beta)


def _own(expert: ExpertWeights, device: torch.device) -> ExpertWeights:
    """Copies out of the memory map: a serving process must not wait on a disk page."""

    def move(matrix: PackedMatrix | Tensor) -> PackedMatrix | Tensor:
        if isinstance(matrix, PackedMatrix):
            packed = matrix.packed.to(device, copy=True)
            return PackedMatrix(packed, matrix.scale.to(device, copy=True))
        return matrix.to(device, copy=True)

    return ExpertWeights(move(expert.w1), move(expert.w2), move(expert.w3))
