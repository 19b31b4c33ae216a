"""The exchange over the mesh: rows out to the expert actors, partial sums back.

T rows, D latent width, K experts per token, P expert actors. One row travels per (token, expert
actor that serves at least one of its choices); the partial sums come back, are added in rank order
and rounded to float32 once. Sent in float64 they add up to the same float32 however the experts
are placed and whichever copy serves a choice.
"""

import contextlib
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from expertmesh.actors.exchange.base import ExchangeError, MisuseError
from expertmesh.actors.exchange.control import AttentionControl
from expertmesh.actors.exchange.counted import CountedAttention
from expertmesh.actors.exchange.direct import DirectAttention
from expertmesh.actors.exchange.formats import Formats, agree, formats_of
from expertmesh.actors.exchange.layouts import (
    AttentionEnd,
    ExactAttention,
    Flight,
    PaddedAttention,
)
from expertmesh.actors.exchange.opening import NO_LAYER, StepPlan
from expertmesh.actors.exchange.process_group import Groups, Where
from expertmesh.actors.exchange.replicas import ReplicaChoice
from expertmesh.actors.exchange.roster import Roster, Routing
from expertmesh.actors.exchange.settings import ExchangeSettings
from expertmesh.actors.exchange.versions import Choices, RoutingVersions
from expertmesh.actors.exchange.whole import WholeAttention, WholeChunk, is_few
from expertmesh.actors.exchange.wire import Frame, Round, read_headers, write_headers
from expertmesh.actors.model.upload import uploads_for
from expertmesh.kernels.registry import Kernels, load_kernels

ENDS: dict[str, Callable[[Groups, Formats], AttentionEnd]] = {
    "exact": ExactAttention,
    "padded": PaddedAttention,
    "mixed": CountedAttention,
}


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

    micro: int
    chunks: list[Chunk | WholeChunk]


@dataclass(slots=True)
class OpenStep:
    """Where this rank is in a step that all ranks go through in one order."""

    plan: StepPlan
    choices: Choices
    micros: int  # of this rank; the plan may have more
    parts: list[tuple[int, int]]  # (layer, micro-batch)
    whole: WholeAttention | None  # takes the rounds of a step of few rows, in layout "mixed"
    done: int = 0  # parts that this rank has sent, rows or none

    def find(self, layer: int, micro: int) -> int:
        """Which part that is; -1 if there is none such to come."""
        try:
            return self.parts.index((layer, micro), self.done) if micro < self.micros else -1
        except ValueError:
            return -1


class MeshExchange:
    """One attention rank's end of one epoch. One engine thread drives it; `route`, `abort` and
    the properties may be used from any thread."""

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
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        on_wake: Callable[[], None] | None = None,
        kernels: Kernels | None = None,
    ) -> None:
        """Meets the other ranks of the epoch; raises ExchangeError when they do not come.

        host: the address other ranks reach this process at. dtype: what the model computes in.
        on_wake: called from another thread when `peer_waiting` may have become true. kernels: who
        encodes float8 latents; by default what "auto" takes. Raises ValueError for a roster in
        which no actor holds some expert.
        """
        self.device = torch.device(device)
        self._fp8_encode = (kernels or load_kernels(device_type=self.device.type)).fp8_encode
        self.roster, self._max_rows = roster, settings.max_rows
        self._versions = RoutingVersions(roster, num_experts)
        self._announced = self.version = roster.version
        self._width, self._on_wake = width, on_wake
        self._groups = groups = Groups(roster, rank, settings, self.device, host)
        formats = formats_of(settings, width, top_k, dtype, self.device)
        agree(groups, formats)
        self._dtype = formats.dispatch[0].dtype
        self._uploads = uploads_for(self.device)
        tell = None
        self._end: AttentionEnd
        if formats.layout == "direct":
            self._end = direct = DirectAttention(groups, formats, host)
            tell = direct.tell
        else:
            self._end = ENDS[formats.layout](groups, formats)
        self._whole: WholeAttention | None = None
        if formats.layout == "mixed":
            self._whole = WholeAttention(groups, formats, self._uploads)
        # Both ways of a mixed exchange must round alike, whatever the sums travel in.
        self._sum_dtype = torch.float64 if formats.layout == "mixed" else torch.float32
        self._control = AttentionControl(groups, on_wake, tell)
        groups.met()
        self._step: OpenStep | None = None
        self._in_flight: set[int] = set()
        self._fillers: dict[
            int, list[Chunk | WholeChunk]
        ] = {}  # by micro-batch, whose buffers they use
        self.rows_sent = [0] * roster.experts  # by expert actor
        self.dispatch_s = self.combine_s = 0.0

    @property
    def rank(self) -> int:
        return self._groups.rank

    @property
    def step(self) -> int:
        """The last step this rank has opened; -1 before the first."""
        return self._control.step

    @property
    def peer_waiting(self) -> bool:
        """The engine must call join_step (or begin_step): another replica has opened a step or is
        lost, or the others have yet to hear of a newer routing."""
        return self._control.listeners.news or self._versions.newest > self._announced

    @property
    def closed(self) -> bool:
        """The epoch is over on this rank."""
        return self._groups.closed

    def route(self, routing: Routing) -> None:
        """From the first step on in which all attention ranks know it, rows go by `routing`.

        From any thread. Raises ValueError when it does not fit the epoch.
        """
        self._versions.add(routing)
        if self._on_wake is not None:
            self._on_wake()

    def begin_step(self, rows: int, micros: int = 1, first_layer: int | None = None) -> None:
        """Enters the next step with all ranks. `rows`: at most so many in any one dispatch.

        first_layer: this rank sends rows for the layers from this one on (absolute number); None
        for all. Raises ExchangeError.
        """
        if self._step is not None:
            raise self._misuse("open", "begin_step inside a step")
        first = -1 if first_layer is None else first_layer
        self._announced = newest = self._versions.newest
        plan = self._control.open(rows, micros, self._max_rows, newest, first)
        try:
            choices = self._versions.use(plan.version)
        except KeyError:
            self._groups.close()
            reason = f"routing version {plan.version} is not known here"
            raise ExchangeError(self.rank, -1, "open", plan.step, reason) from None
        self.version = plan.version
        layers = self.roster.layers
        whole = self._whole if is_few(plan) else None
        if whole is not None:
            whole.begin(plan, layers)
        self._step = OpenStep(plan, choices, micros, plan.parts(layers), whole)

    def end_step(self) -> None:
        step = self._step
        if step is None or self._in_flight:
            waiting = f"micro-batches {sorted(self._in_flight)} never combined"
            raise self._misuse("close", waiting if self._in_flight else "end_step outside a step")
        self._fill(step, len(step.parts))
        for micro in list(self._fillers):
            self._land_fillers(micro)
        self._step = None
        if step.whole is not None:
            step.whole.check()

    def join_step(self) -> None:
        """A whole step without rows, for a replica that has no work while another has."""
        self.begin_step(0, 1, NO_LAYER)
        self.end_step()

    def dispatch(
        self, layer: int, z_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor, micro: int = 0
    ) -> Pending:
        """Sends every row to the actors that serve its choices; returns at once, unless other
        ranks take part in layers before that this rank has no rows for."""
        began = time.perf_counter()
        step = self._step
        position = -1 if step is None else step.find(layer, micro)
        if step is None or position < 0:
            raise self._misuse("dispatch", f"layer {layer}, micro-batch {micro} is not in the step")
        if micro in self._in_flight:
            raise self._misuse("dispatch", f"micro-batch {micro} is still in flight")
        plan, most = step.plan, self._max_rows
        if z_TD.shape[0] > plan.chunks * most:
            raise self._misuse("dispatch", f"{z_TD.shape[0]} rows after a begin_step of fewer")
        self._fill(step, position)
        self._land_fillers(micro)
        self._in_flight.add(micro)
        pending = Pending(micro, [])
        for chunk in range(plan.chunks):
            at = Round(plan.epoch, plan.step, layer, micro, chunk)
            part = slice(chunk * most, (chunk + 1) * most)
            pending.chunks.append(self._post(step, at, z_TD[part], ids_TK[part], weights_TK[part]))
        step.done += 1
        if micro == step.micros - 1:  # the others must not wait for what this rank does not have
            self._fill(step, step.done + plan.micros - step.micros)
        self.dispatch_s += time.perf_counter() - began
        return pending

    def combine(self, pending: Pending) -> Tensor:
        """fp32 [T, D]: the sum over all experts of every row. Raises ExchangeError."""
        began = time.perf_counter()
        parts = [self._sum(chunk) for chunk in pending.chunks]
        y_TD = parts[0] if len(parts) == 1 else torch.cat(parts)
        self._in_flight.discard(pending.micro)
        self.combine_s += time.perf_counter() - began
        return y_TD

    def close(self) -> None:
        """Leaves the epoch: the expert actors' loops end, other replicas see that we left."""
        # A failing farewell means a broken epoch; closing the sockets tells the rest.
        with contextlib.suppress(ExchangeError):
            self._control.leave()
        self._groups.close()
        self._control.listeners.join(1.0)

    def abort(self, reason: str) -> None:
        """Breaks the epoch at once, from any thread: every wait on every rank fails.

        The next begin_step raises with this reason, and `peer_waiting` is true so that an idle
        engine gets there.
        """
        self._groups.close(reason)

    def _fill(self, step: OpenStep, until: int) -> None:
        """Sends empty rounds for all parts before `until`, as every rank takes part in each.

        The buffers of a micro-batch serve all its layers: at most one layer is in flight.
        """
        plan = step.plan
        for layer, micro in step.parts[step.done : until]:
            if micro in self._in_flight:
                raise self._misuse("dispatch", f"micro-batch {micro} is behind the others")
            self._land_fillers(micro)
            chunks = [
                self._post_empty(step, Round(plan.epoch, plan.step, layer, micro, chunk))
                for chunk in range(plan.chunks)
            ]
            self._fillers[micro] = chunks
            step.done += 1

    def _land_fillers(self, micro: int) -> None:
        for chunk in self._fillers.pop(micro, ()):
            if isinstance(chunk, WholeChunk):
                self._sum(chunk)
            else:
                self._land(chunk)

    def _post_empty(self, step: OpenStep, at: Round) -> Chunk | WholeChunk:
        if step.whole is not None:
            return step.whole.post(at, step.plan.capacity, step.choices[at.layer], ())
        frames = self._end.outgoing(at, step.plan.capacity)
        counts = [0] * len(frames)
        write_headers(frames, at, counts)
        flight = self._end.post(at, step.plan.capacity, counts)
        return Chunk(flight, 0, [None] * len(frames), counts)

    def _post(
        self, step: OpenStep, at: Round, z_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor
    ) -> Chunk | WholeChunk:
        if z_TD.shape[0] == 0:
            return self._post_empty(step, at)
        capacity = step.plan.capacity
        scale: tuple[Tensor, ...] = ()
        if self._dtype == torch.uint8:
            z_TD, scale_T1 = self._fp8_encode(z_TD)
            scale = (scale_T1,)
        elif z_TD.dtype != self._dtype:
            z_TD = z_TD.to(self._dtype)
        choice = step.choices[at.layer]
        if step.whole is not None:
            self.rows_sent = [sent + len(z_TD) for sent in self.rows_sent]
            return step.whole.post(at, capacity, choice, (z_TD, ids_TK, weights_TK, *scale))
        ids, parts, counts = _split(choice, ids_TK.cpu().numpy(), len(self.rows_sent))
        ids_PTK, *some = self._uploads.keep(ids, *(part for part in parts if part is not None))
        rest = iter(some)
        sent = [None if part is None else next(rest) for part in parts]
        frames = self._end.outgoing(at, capacity)
        write_headers(frames, at, counts)
        for frame, mine_TK, rows, count in zip(frames, ids_PTK, sent, counts, strict=True):
            _fill_frame(frame, (z_TD, mine_TK, weights_TK, *scale), rows, count)
        self.rows_sent = [a + b for a, b in zip(self.rows_sent, counts, strict=True)]
        return Chunk(self._end.post(at, capacity, counts), z_TD.shape[0], sent, counts)

    def _sum(self, chunk: Chunk | WholeChunk) -> Tensor:
        """The partial sums of one chunk, added in rank order, rounded to float32 once."""
        if isinstance(chunk, WholeChunk):
            assert self._whole is not None, "it has made the chunk"
            return self._whole.land(chunk)
        y_TD: Tensor | None = None
        for frame, rows, count in zip(self._land(chunk), chunk.sent, chunk.counts, strict=True):
            sum_ND = frame.views(count)[0]
            if sum_ND.dtype.itemsize < self._sum_dtype.itemsize:
                sum_ND = sum_ND.to(self._sum_dtype)
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
        return y_TD.float()

    def _land(self, chunk: Chunk) -> list[Frame]:
        at = chunk.flight.at
        replies = self._end.land(chunk.flight)
        headers = read_headers(replies)
        for expert, (header, count) in enumerate(zip(headers, chunk.counts, strict=True)):
            wrong = replies[expert].mismatch(header, at)
            if wrong is None and header.rows != count:
                wrong = f"header mismatch: {count} rows went out, {header.rows} came back"
            if wrong is not None:
                self._groups.close()
                peer = self.roster.attention + expert
                raise Where(peer, at.layer, "combine", at.step).error(wrong)
        return replies

    def _misuse(self, phase: str, reason: str) -> MisuseError:
        """The model and the exchange disagree on the step: nobody else may wait for it."""
        self._groups.close()
        return MisuseError(self.rank, -1, phase, self.step, reason)


def _split(
    choice: ReplicaChoice, ids_TK: NDArray[np.int64], actors: int
) -> tuple[NDArray[np.int32], list[NDArray[np.int64] | None], list[int]]:
    """Which rows each of P expert actors gets; on the host, where a tiny op costs least.

    Returns int32 [P, T, K], per actor the experts it shall compute and -1 elsewhere, then per actor
    the numbers of its rows (None: all of them) and their count.
    """
    mine_PTK = choice.assign(ids_TK) == np.arange(actors)[:, None, None]
    ids_PTK = np.where(mine_PTK, ids_TK, -1).astype(np.int32)
    here_PT = mine_PTK.any(2)
    counts: list[int] = here_PT.sum(1).tolist()
    rows = len(ids_TK)
    parts = [
        None if count == rows else here_T.nonzero()[0]
        for here_T, count in zip(here_PT, counts, strict=True)
    ]
    return ids_PTK, parts, counts


def _fill_frame(frame: Frame, sources: tuple[Tensor, ...], rows: Tensor | None, count: int) -> None:
    """Writes `rows` of the sources straight into the message."""
    for source, view in zip(sources, frame.views(count), strict=True):
        if rows is None:
            view.copy_(source)
        else:
            torch.index_select(source, 0, rows, out=view)
