"""The exchange over the mesh: rows out to the expert actors, partial sums back.

T rows, D latent width, K experts per token. One row travels per (token, expert actor that holds
at least one of its experts); the partial sums come back in float32 and are added in rank order, so
a result does not depend on which actor answers first.
"""

import contextlib
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from expertmesh.actors.exchange.base import ExchangeError
from expertmesh.actors.exchange.control import AttentionControl, StepPlan
from expertmesh.actors.exchange.direct import DirectAttention
from expertmesh.actors.exchange.layouts import (
    AttentionEnd,
    ExactAttention,
    Flight,
    Formats,
    PaddedAttention,
)
from expertmesh.actors.exchange.process_group import Groups, Where
from expertmesh.actors.exchange.roster import Roster
from expertmesh.actors.exchange.settings import ExchangeSettings
from expertmesh.actors.exchange.wire import (
    Frame,
    Round,
    combine_sections,
    dispatch_sections,
    to_float8,
)

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float8": torch.uint8}


def formats_of(settings: ExchangeSettings, width: int, top_k: int, device: torch.device) -> Formats:
    name = settings.dispatch_dtype
    if name == "auto":
        name = "float32" if device.type == "cpu" else "bfloat16"
    dispatch = dispatch_sections(DTYPES[name], width, top_k)
    return Formats(dispatch, combine_sections(DTYPES[settings.combine_dtype], width))


def layout_of(settings: ExchangeSettings, device: torch.device) -> str:
    if settings.layout == "auto":
        return "padded" if device.type == "cuda" else "direct"
    return settings.layout


@dataclass(slots=True)
class Chunk:
    """A posted round and, per expert actor, which of the chunk's rows went there (None: all)."""

    flight: Flight
    rows: int
    sent: list[Tensor | None]
    counts: list[int]


@dataclass(slots=True)
class Pending:
    """Rows on their way: what dispatch returns and combine takes."""

    rows: int
    chunks: list[Chunk]
    fillers: list[Chunk]  # empty rounds of micro-batches that only other ranks have


class MeshExchange:
    """One attention rank's end. Not thread-safe: one engine thread drives it."""

    def __init__(
        self,
        roster: Roster,
        rank: int,
        settings: ExchangeSettings,
        *,
        width: int,
        top_k: int,
        num_experts: int,
        host: str,
        device: torch.device | str = "cpu",
        on_wake: Callable[[], None] | None = None,
    ) -> None:
        """Meets the other ranks of the epoch; raises ExchangeError when they do not come.

        host: the address other ranks reach this process at. on_wake: called from another thread
        when a peer opens a step or is lost, see `peer_waiting`.
        """
        self.device = torch.device(device)
        self.roster, self._max_rows = roster, settings.max_rows
        self._width, self._top_k = width, top_k
        self._groups = Groups(roster, rank, settings, self.device, host)
        formats = formats_of(settings, width, top_k, self.device)
        self._dtype = formats.dispatch[0].dtype
        layout, tell = layout_of(settings, self.device), None
        self._end: AttentionEnd
        if layout == "direct":
            self._end = direct = DirectAttention(self._groups, formats, settings.max_rows, host)
            tell = direct.tell
        else:
            end = PaddedAttention if layout == "padded" else ExactAttention
            self._end = end(self._groups, formats, settings.max_rows)
        self._tables = {
            layer: torch.stack(tables).numpy()
            for layer, tables in roster.slot_tables(num_experts).items()
        }
        self._control = AttentionControl(self._groups, on_wake, tell)
        self._plan: StepPlan | None = None
        self._micros = 1
        self._in_flight: set[int] = set()
        self.rows_sent = [0] * roster.experts  # by expert actor
        self.dispatch_s = self.combine_s = 0.0

    @property
    def peer_waiting(self) -> bool:
        """Another replica has opened a step (or is lost): the engine must call begin_step."""
        return self._control.peer_waiting

    def begin_step(self, rows: int, micros: int = 1) -> None:
        """Enters the next step with all ranks. `rows`: at most so many in any one dispatch."""
        if self._plan is not None:
            raise self._misuse("open", "begin_step inside a step")
        self._micros = micros
        self._plan = self._control.open(rows, micros, self._max_rows)

    def end_step(self) -> None:
        if self._in_flight:
            raise self._misuse("close", f"micro-batches {sorted(self._in_flight)} never combined")
        self._plan = None

    def join_step(self) -> None:
        """A whole step without rows, for a replica that has no work while another has."""
        self.begin_step(0)
        nothing = torch.empty(0, self._width, device=self.device)
        ids = torch.empty(0, self._top_k, dtype=torch.int64, device=self.device)
        weights = torch.empty(0, self._top_k, device=self.device)
        for layer in self.roster.layers:
            self.combine(self.dispatch(layer, nothing, ids, weights))
        self.end_step()

    def dispatch(
        self, layer: int, z_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor, micro: int = 0
    ) -> Pending:
        """Sends every row to the actors that hold its experts; returns at once."""
        began = time.perf_counter()
        plan = self._plan
        if plan is None or layer not in self._tables or micro >= self._micros:
            raise self._misuse("dispatch", f"layer {layer}, micro-batch {micro} is not in the step")
        if micro in self._in_flight:
            raise self._misuse("dispatch", f"micro-batch {micro} is still in flight")
        rows, most = z_TD.shape[0], self._max_rows
        if rows > plan.chunks * most:
            raise self._misuse("dispatch", f"{rows} rows after a begin_step of fewer")
        self._in_flight.add(micro)
        pending = Pending(rows, [], [])
        for chunk in range(plan.chunks):
            at = Round(plan.epoch, plan.step, layer, micro, chunk)
            part = slice(chunk * most, (chunk + 1) * most)
            pending.chunks.append(self._post(at, z_TD[part], ids_TK[part], weights_TK[part]))
        if micro == self._micros - 1:
            for extra in range(self._micros, plan.micros):
                for chunk in range(plan.chunks):
                    at = Round(plan.epoch, plan.step, layer, extra, chunk)
                    empty = self._post(at, z_TD[:0], ids_TK[:0], weights_TK[:0])
                    pending.fillers.append(empty)
        self.dispatch_s += time.perf_counter() - began
        return pending

    def combine(self, pending: Pending) -> Tensor:
        """fp32 [T, D]: the sum over all experts of every row. Raises ExchangeError."""
        began = time.perf_counter()
        parts = [self._sum(chunk) for chunk in pending.chunks]
        y_TD = parts[0] if len(parts) == 1 else torch.cat(parts)
        for filler in pending.fillers:
            self._land(filler)
        self._in_flight.discard(pending.chunks[0].flight.at.micro)
        self.combine_s += time.perf_counter() - began
        return y_TD

    def _sum(self, chunk: Chunk) -> Tensor:
        """The partial sums of one chunk, added in rank order."""
        y_TD: Tensor | None = None
        for frame, rows, count in zip(self._land(chunk), chunk.sent, chunk.counts, strict=True):
            sum_ND = frame.views(count)[0].float()
            if rows is None and y_TD is None:
                y_TD = sum_ND.clone()  # the frame is written again by the next round
                continue
            if y_TD is None:
                y_TD = sum_ND.new_zeros(chunk.rows, self._width)
            if rows is None:
                y_TD += sum_ND
            else:
                y_TD.index_add_(0, rows, sum_ND)
        assert y_TD is not None, "an epoch has at least one expert actor"
        return y_TD

    def close(self) -> None:
        """Leaves the epoch: the expert actors' loops end, other replicas see that we left."""
        # A failing farewell means a broken epoch; closing the sockets tells the rest.
        with contextlib.suppress(ExchangeError):
            self._control.leave()
        self._groups.close()

    def abort(self, reason: str) -> None:
        """Breaks the epoch at once, from any thread: every wait on every rank fails.

        The next begin_step raises with this reason, and `peer_waiting` is true so that an idle
        engine gets there.
        """
        self._groups.close(reason)
        self._control.wake()

    def _post(self, at: Round, z_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor) -> Chunk:
        assert self._plan is not None
        capacity = self._plan.capacity
        scale: tuple[Tensor, ...] = ()
        if self._dtype == torch.uint8:
            z_TD, scale_T1 = to_float8(z_TD)
            scale = (scale_T1,)
        elif z_TD.dtype != self._dtype:
            z_TD = z_TD.to(self._dtype)
        slots, parts, counts = _split(self._tables[at.layer], ids_TK.cpu().numpy())
        slots_PTK = torch.from_numpy(slots).to(self.device)
        sent = [None if p is None else torch.from_numpy(p).to(self.device) for p in parts]
        frames = self._end.outgoing(at, capacity)
        for frame, slots_TK, rows, count in zip(frames, slots_PTK, sent, counts, strict=True):
            frame.write_header(at, count)
            _fill(frame, (z_TD, slots_TK, weights_TK, *scale), rows, count)
        self.rows_sent = [a + b for a, b in zip(self.rows_sent, counts, strict=True)]
        return Chunk(self._end.post(at, capacity, counts), z_TD.shape[0], sent, counts)

    def _land(self, chunk: Chunk) -> list[Frame]:
        at = chunk.flight.at
        replies = self._end.land(chunk.flight)
        for expert, (frame, count) in enumerate(zip(replies, chunk.counts, strict=True)):
            wrong = frame.mismatch(at)
            if wrong is None and frame.rows != count:
                wrong = f"header mismatch: {count} rows went out, {frame.rows} came back"
            if wrong is not None:
                self._groups.close()
                peer = self.roster.attention + expert
                raise Where(peer, at.layer, "combine", at.step).error(wrong)
        return replies

    def _misuse(self, phase: str, reason: str) -> ExchangeError:
        """The model and the exchange disagree on the step: nobody else may wait for it."""
        self._groups.close()
        return ExchangeError(self._groups.rank, -1, phase, self._control.step, reason)


def _split(
    tables_PE: np.ndarray, ids_TK: np.ndarray
) -> tuple[np.ndarray, list[np.ndarray | None], list[int]]:
    """Which rows each of P expert actors gets; on the host, where a tiny op costs least.

    tables_PE: int32 local slot by expert, -1 elsewhere. Returns local slots [P, T, K], then per
    actor the numbers of its rows (None: all of them) and their count.
    """
    slots_PTK = tables_PE[:, ids_TK]
    here_PT = slots_PTK.max(2) >= 0
    counts: list[int] = here_PT.sum(1).tolist()
    rows = len(ids_TK)
    parts = [
        None if count == rows else here_T.nonzero()[0]
        for here_T, count in zip(here_PT, counts, strict=True)
    ]
    return slots_PTK, parts, counts


def _fill(frame: Frame, sources: tuple[Tensor, ...], rows: Tensor | None, count: int) -> None:
    """Writes `rows` of the sources straight into the message."""
    for source, view in zip(sources, frame.views(count), strict=True):
        if rows is None:
            view.copy_(source)
        else:
            torch.index_select(source, 0, rows, out=view)
