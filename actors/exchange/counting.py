"""What the routers chose and what came back, counted on the attention side of the exchange.

L MoE layers, E experts, T rows, K experts per token, D latent width. Only rows of a batch reach an
exchange's `dispatch`: no padding, no idle join, no row that an epoch change made the mesh send
again, so nothing of the kind is ever counted. A row that the engine computes again (after a
preemption) loads the experts again and counts again.

On the hot path a layer costs an append and a sum; the adding up is done once per step. Nothing
waits for a device.
"""

import math
import threading
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol, runtime_checkable
from uuid import uuid4

import msgspec
import numpy as np
import torch
from torch import Tensor

from expertmesh.actors.exchange.base import Exchange

# From this many rows on, ids are held as int16 until the step ends; below, a cast costs more.
CAST_ROWS = 64
# Layers are added up together while they have at most so many ids: bounds the int64 copy.
GROUP_IDS = 1 << 20
# A recording takes no more memory than this, whatever was asked for.
TRACE_BYTES = 1 << 28


class RoutingSnapshot(msgspec.Struct, frozen=True):
    """Counters that only grow while `source` stays the same: one life of one replica.

    hits: int64 little-endian [L, E], tokens that chose each expert. bad_weights, bad_rows: per
    layer, rows whose router weights, and rows whose combined sum, were not finite.
    """

    source: str
    layers: tuple[int, ...]
    experts: int
    top_k: int
    steps: int
    hits: bytes
    bad_weights: tuple[int, ...]
    bad_rows: tuple[int, ...]

    def hits_LE(self) -> np.ndarray:
        """int64 [L, E], read-only."""
        return np.frombuffer(self.hits, "<i8").reshape(len(self.layers), self.experts)


class Trace(msgspec.Struct, frozen=True):
    """The choices of whole tokens. ids: int16 little-endian [tokens, L, K], in router order."""

    layers: tuple[int, ...]
    experts: int
    top_k: int
    ids: bytes

    def ids_NLK(self) -> np.ndarray:
        """int16 [tokens, L, K], read-only."""
        return np.frombuffer(self.ids, "<i2").reshape(-1, len(self.layers), self.top_k)


class _Micro:
    """One micro-batch of a step. sums: on a device, where looking at them now would wait."""

    __slots__ = ("at", "ids", "sums")

    def __init__(self) -> None:
        self.at: list[int] = []
        self.ids: list[Tensor] = []
        self.sums: list[tuple[int, Tensor, Tensor]] = []


class RoutingCounts:
    """Filled by one engine thread, read by any. A step that fails half-way leaves no choices."""

    def __init__(
        self,
        layers: Sequence[int],
        experts: int,
        top_k: int,
        device: torch.device | str = "cpu",
    ) -> None:
        """layers: absolute numbers of the MoE layers in the order of a step."""
        assert experts <= np.iinfo(np.int16).max
        self.layers, self.experts, self.top_k = tuple(layers), experts, top_k
        self.device = torch.device(device)
        self._at = {layer: i for i, layer in enumerate(self.layers)}
        self._source, self._steps = uuid4().hex, 0
        self._lock = threading.Lock()  # held for one step's adding: readers see whole steps
        size, total = len(self.layers), len(self.layers) * experts
        self._counters = torch.zeros(total + 2 * size, dtype=torch.int64, device=self.device)
        self._hits, self._bad_2L = self._counters[:total], self._counters[total:].view(2, size)
        self._offsets_L11 = (torch.arange(size, device=self.device) * experts).view(-1, 1, 1)
        self._one = torch.ones((), dtype=torch.int64, device=self.device)
        self._micros: dict[int, _Micro] = {}
        self._trace_NLK: Tensor | None = None
        self._traced = 0
        self._reader = _DeviceReader(self._counters) if self.device.type == "cuda" else None

    # --- the engine's thread ------------------------------------------------------------------

    def begin(self) -> None:
        """Forgets a step that did not end."""
        self._micros = {}

    def chosen(self, layer: int, ids_TK: Tensor, micro: int = 0) -> None:
        """ids_TK: int64; nobody may write to it before the step ends."""
        step = self._micros.get(micro)
        if step is None:
            step = self._micros[micro] = _Micro()
        step.at.append(self._at[layer])
        step.ids.append(ids_TK.to(torch.int16) if ids_TK.shape[0] >= CAST_ROWS else ids_TK)

    def combined(self, layer: int, weights_TK: Tensor, y_TD: Tensor, micro: int = 0) -> None:
        """Looks for rows that are not finite. weights_TK: the router's, which made y_TD."""
        at = self._at[layer]
        if self._reader is not None:
            self._micros[micro].sums.append((at, weights_TK.sum(1), y_TD.sum(1)))
        elif not math.isfinite(float(y_TD.sum())):
            # One look serves both: a weight that is not finite makes its row so. Each row is
            # looked at again, for the sum of many large rows may overflow.
            for kind, rows in enumerate((weights_TK, y_TD)):
                self._bad_2L[kind, at] += (~torch.isfinite(rows).all(1)).sum()

    def end(self) -> None:
        """Adds the step to the counters."""
        with self._lock:
            if self._reader is not None:
                self._reader.before_write()
            for number in sorted(self._micros):
                self._add(self._micros[number])
            self._steps += 1
            if self._reader is not None:
                self._reader.after_write()
        self._micros = {}

    def _add(self, micro: _Micro) -> None:
        whole = micro.at == list(range(len(self.layers)))
        if whole:  # every layer has the same rows: one pass over all
            ids_LTK = torch.stack(micro.ids)
            group = max(1, GROUP_IDS // max(1, micro.ids[0].numel()))
            for first in range(0, len(self.layers), group):
                self._add_hits(first, ids_LTK[first : first + group])
            if self._trace_NLK is not None:
                self._write_trace(self._trace_NLK, ids_LTK)
        else:
            for at, ids_TK in zip(micro.at, micro.ids, strict=True):
                self._add_hits(at, ids_TK[None])
        for at, *sums in micro.sums:
            self._bad_2L[:, at] += (~torch.isfinite(torch.stack(sums))).sum(1)

    def _add_hits(self, first: int, ids_LTK: Tensor) -> None:
        """ids_LTK: of the layers from number `first` on."""
        index = (ids_LTK + self._offsets_L11[first : first + len(ids_LTK)]).view(-1)
        self._hits.scatter_add_(0, index, self._one.expand(index.numel()))

    def _write_trace(self, trace_NLK: Tensor, ids_LTK: Tensor) -> None:
        room = min(ids_LTK.shape[1], len(trace_NLK) - self._traced)
        trace_NLK[self._traced : self._traced + room] = ids_LTK[:, :room].transpose(0, 1)
        self._traced += room

    # --- any thread ---------------------------------------------------------------------------

    def snapshot(self) -> RoutingSnapshot:
        """The counters after the last whole step."""
        total = len(self.layers) * self.experts
        if self._reader is None:
            with self._lock:
                steps, counters = self._steps, self._counters.numpy().astype("<i8")
        else:
            with self._lock:
                steps = self._steps
                self._reader.request()
            counters = self._reader.result()
        weights, rows = counters[total:].reshape(2, -1).tolist()
        return RoutingSnapshot(
            self._source,
            self.layers,
            self.experts,
            self.top_k,
            steps,
            counters[:total].tobytes(),
            tuple(weights),
            tuple(rows),
        )

    def start_recording(self, tokens: int) -> None:
        """Keeps the choices of the next tokens, at most so many. Replaces a recording in progress.

        [tokens, L, K] int16: 3 KB per token at K3's shape, in all at most TRACE_BYTES.
        """
        size = len(self.layers), self.top_k
        tokens = min(tokens, TRACE_BYTES // (2 * size[0] * size[1]))
        trace_NLK = torch.empty(tokens, *size, dtype=torch.int16, device=self.device)
        with self._lock:
            self._trace_NLK, self._traced = trace_NLK, 0

    @property
    def recorded(self) -> int:
        """Tokens recorded so far."""
        return self._traced

    def stop_recording(self) -> Trace:
        """What was recorded since start_recording; empty without one."""
        with self._lock:
            trace_NLK, rows = self._trace_NLK, self._traced
            self._trace_NLK, self._traced = None, 0
        ids = b"" if trace_NLK is None else trace_NLK[:rows].cpu().numpy().astype("<i2").tobytes()
        return Trace(self.layers, self.experts, self.top_k, ids)


class _DeviceReader:
    """Copies device counters to the host beside the engine's stream, which never waits here.

    Writer and reader wait for each other on the device only; the host waits in `result`.
    """

    def __init__(self, counters: Tensor) -> None:
        self._counters = counters
        self._host = torch.empty(counters.shape, dtype=counters.dtype, pin_memory=True)
        self._stream = torch.cuda.Stream(counters.device)  # type: ignore[no-untyped-call]
        self._written = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._written.record()
        self._one_reader = threading.Lock()  # from request to result

    def before_write(self) -> None:
        torch.cuda.current_stream(self._counters.device).wait_event(self._copied)

    def after_write(self) -> None:
        self._written.record()

    def request(self) -> None:
        self._one_reader.acquire()
        with torch.cuda.stream(self._stream):
            self._stream.wait_event(self._written)
            self._host.copy_(self._counters, non_blocking=True)
            self._copied.record()

    def result(self) -> np.ndarray:
        try:
            self._copied.synchronize()
            return self._host.numpy().astype("<i8")
        finally:
            self._one_reader.release()


@runtime_checkable
class _Joinable(Protocol):
    def join_step(self) -> None: ...


class _Flight(NamedTuple):
    layer: int
    micro: int
    weights_TK: Tensor
    pending: Any


class CountingExchange:
    """An exchange whose routing is counted.

    It stands outside whatever sends a layer again, so a choice is counted once. Warm-up goes
    through `inner` and is not counted.
    """

    def __init__(self, inner: Exchange, counts: RoutingCounts) -> None:
        self.inner, self.counts = inner, counts

    def begin_step(self, rows: int, micros: int = 1) -> None:
        self.counts.begin()
        self.inner.begin_step(rows, micros)

    def dispatch(
        self, layer: int, z_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor, micro: int = 0
    ) -> _Flight:
        pending = self.inner.dispatch(layer, z_TD, ids_TK, weights_TK, micro)
        # After the rows have left: the experts compute while this side counts.
        self.counts.chosen(layer, ids_TK, micro)
        return _Flight(layer, micro, weights_TK, pending)

    def combine(self, pending: _Flight) -> Tensor:
        y_TD = self.inner.combine(pending.pending)
        self.counts.combined(pending.layer, pending.weights_TK, y_TD, pending.micro)
        return y_TD

    def end_step(self) -> None:
        self.inner.end_step()
        self.counts.end()

    def join_step(self) -> None:
        """Takes part in another rank's step; it has no rows, so nothing is counted."""
        if isinstance(self.inner, _Joinable):
            self.inner.join_step()

    @property
    def peer_waiting(self) -> bool:
        return bool(getattr(self.inner, "peer_waiting", False))
