"""Steps of few rows, with every size known from the announcements: nothing is counted on the way.

Every row goes to every expert actor, at its own place in a message of the step's capacity; which
of a row's experts an actor computes stands in the ids, -1 for the others and in places without a
row. The actors' sums come back in the same places, zero where an actor had nothing to compute.
So a device fills, sends, computes and adds without telling the host anything. A message is as long
as the capacity whoever is meant, which all-to-all with equal splits would make it anyway.

A header that is not the expected one turns the sums into NaN on the device, so that no token comes
of them; the host reads what was found once, at the end of the step.
"""

import time
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from expertmesh.actors.exchange.formats import Formats
from expertmesh.actors.exchange.layouts import Padded
from expertmesh.actors.exchange.opening import StepPlan
from expertmesh.actors.exchange.process_group import Groups, Where
from expertmesh.actors.exchange.replicas import ReplicaChoice
from expertmesh.actors.exchange.wire import HEADER_BYTES, MAGIC, Round, Section, aligned
from expertmesh.actors.model.upload import Uploads

# Steps of more rows are worth counting: an actor then gets only the rows that concern it.
FEW_ROWS = 256
HEADER_WORDS = HEADER_BYTES // 8


def is_few(plan: StepPlan) -> bool:
    """Whether the step goes in whole messages: the same answer on every rank."""
    return plan.chunks == 1 and plan.capacity <= FEW_ROWS


class Sheet:
    """The messages of all peers side by side in `buffer`, uint8 [peers, message].

    headers: int64 [peers, 8]. sections: one [peers, capacity, width] each.
    """

    def __init__(self, buffer: Tensor, sections: tuple[Section, ...], capacity: int) -> None:
        self.buffer = buffer
        self.headers = buffer[:, :HEADER_BYTES].view(torch.int64)
        parts, at = [], HEADER_BYTES
        for section in sections:
            size = section.row_bytes * capacity
            part = buffer[:, at : at + size].view(section.dtype)
            parts.append(part.view(len(buffer), capacity, section.width))
            at += aligned(size)
        self.sections = tuple(parts)


class _Whole(Padded):
    """rounds: of the present step, in order; their headers lie on the device, [rounds, 8]."""

    def __init__(self, groups: Groups, formats: Formats, uploads: Uploads) -> None:
        super().__init__(groups, formats)
        self._uploads = uploads
        self._sheets: dict[tuple[int, ...], Sheet] = {}
        self._found: list[tuple[Round, Tensor]] = []  # bool [peers]: whose header was wrong

    def begin(self, plan: StepPlan, layers: tuple[int, ...]) -> None:
        """Makes the headers of all rounds: that they have `capacity` rows, whoever uses them."""
        rounds = list(plan.rounds(layers))
        words = np.zeros((len(rounds), HEADER_WORDS), np.int64)
        words[:, 0], words[:, -2] = MAGIC, plan.capacity
        if rounds:
            words[:, 1:-2] = rounds
        self._found = []
        self._headers = dict(zip(rounds, self._uploads.keep(words)[0], strict=True))

    def _sheet(self, sections: tuple[Section, ...], capacity: int, *key: int) -> Sheet:
        kept = self._sheets.get((capacity, *key))
        if kept is None:
            whole = self._cut(sections, capacity, *key)[0]
            kept = Sheet(whole.view(self._count, -1), sections, capacity)
            self._sheets[capacity, *key] = kept
        return kept

    def _compare(self, at: Round, headers: Tensor) -> Tensor:
        wrong: Tensor = (headers != self._headers[at]).any(1)
        self._found.append((at, wrong))
        return wrong

    def _raise_wrong(self, found: list[list[bool]], first: int, phase: str) -> None:
        """found: of the step's rounds. first: the rank of the first peer."""
        for (at, _), wrong in zip(self._found, found, strict=True):
            if any(wrong):
                self._groups.close()
                where = Where(first + wrong.index(True), at.layer, phase, at.step)
                raise where.error(f"header mismatch: not the message of {tuple(at)}")


@dataclass(slots=True)
class WholeChunk:
    at: Round
    capacity: int
    rows: int
    sent: Any
    received: Any


class WholeAttention(_Whole):
    """T rows of this rank, P expert actors, C the step's capacity."""

    def __init__(self, groups: Groups, formats: Formats, uploads: Uploads) -> None:
        super().__init__(groups, formats, uploads)
        device = groups.device
        self._actors_P11 = torch.arange(self._count, device=device).view(-1, 1, 1)
        self._places_C1 = torch.arange(FEW_ROWS, device=device).unsqueeze(1)
        self._tables: dict[int, tuple[ReplicaChoice, Tensor]] = {}  # by layer

    def post(
        self, at: Round, capacity: int, choice: ReplicaChoice | None, rows: tuple[Tensor, ...]
    ) -> WholeChunk:
        """rows: latents, ids, weights, and a scale for float8; () for a rank without any. Does not
        wait, neither for peers nor for the device."""
        sheet = self._sheet(self._formats.dispatch, capacity, 0, at.micro)
        sheet.headers.copy_(self._headers[at])
        count = len(rows[0]) if rows else 0
        ids_PCK = sheet.sections[1]
        if choice is not None and count:
            z_TD, ids_TK, weights_TK, *scale = rows
            owner_TK = self._owners(at.layer, choice, ids_TK)
            ids_PCK[:, :count].copy_(ids_TK.where(owner_TK == self._actors_P11, -1))
            sources = (z_TD, weights_TK, *scale)
            for section, source in zip((0, 2, 3), sources, strict=False):
                sheet.sections[section][:, :count].copy_(source)
        ids_PCK[:, count:].fill_(-1)
        sent = self._give(self._groups.dispatch, sheet.buffer.view(-1))
        back = self._sheet(self._formats.combine, capacity, 1, at.micro)
        received = self._take(self._groups.combine, back.buffer.view(-1))
        return WholeChunk(at, capacity, count, sent, received)

    def land(self, chunk: WholeChunk) -> Tensor:
        """fp32 [T, D]: the actors' sums added in float64. Waits for the replies; raises
        ExchangeError."""
        at = chunk.at
        self._wait(chunk.sent, at, "dispatch")
        self._wait(chunk.received, at, "combine")
        back = self._sheet(self._formats.combine, chunk.capacity, 1, at.micro)
        wrong_P = self._compare(at, back.headers)
        sum_TD = back.sections[0][:, : chunk.rows].sum(0, dtype=torch.float64).float()
        poisoned: Tensor = sum_TD.masked_fill_(wrong_P.any(), torch.nan)
        return poisoned

    def check(self) -> None:
        """After the last round. Raises ExchangeError when a reply was not the expected one."""
        if self._found:
            found = torch.stack([wrong for _, wrong in self._found]).tolist()
            self._raise_wrong(found, self._groups.roster.attention, "combine")

    def _owners(self, layer: int, choice: ReplicaChoice, ids_TK: Tensor) -> Tensor:
        """As ReplicaChoice.by_order, on the device."""
        kept = self._tables.get(layer)
        if kept is None or kept[0] is not choice:
            (table_RE,) = self._uploads.keep(choice.orders_RE)
            kept = self._tables[layer] = choice, table_RE
        table_RE = kept[1]
        order_T1 = (ids_TK[:1, :1] + self._places_C1[: len(ids_TK)]) % len(table_RE)
        owner_TK: Tensor = table_RE[order_T1, ids_TK]
        return owner_TK


class Clock(Protocol):
    def mark(self) -> Any: ...
    def seconds(self, begin: Any, end: Any) -> float:
        """Between two marks that have passed."""
        ...


class HostClock:
    def mark(self) -> float:
        return time.perf_counter()

    def seconds(self, begin: float, end: float) -> float:
        return end - begin


class CudaClock:
    """Never run where this was written: there is no GPU."""

    def mark(self) -> Any:
        event: Any = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def seconds(self, begin: Any, end: Any) -> float:
        return float(begin.elapsed_time(end)) / 1000


@dataclass(slots=True)
class Served:
    """One round: the rows that had something to compute, int64 []; marks around the computing."""

    layer: int
    rows: Tensor
    began: Any
    ended: Any


class WholeExpert(_Whole):
    """A attention ranks, C the step's capacity."""

    def __init__(self, groups: Groups, formats: Formats, uploads: Uploads) -> None:
        super().__init__(groups, formats, uploads)
        self._clock: Clock = CudaClock() if groups.device.type == "cuda" else HostClock()
        self._sent: dict[int, tuple[Round, Any]] = {}
        self._served: list[Served] = []

    def begin(self, plan: StepPlan, layers: tuple[int, ...]) -> None:
        super().begin(plan, layers)
        self._served = []

    def receive(self, at: Round, capacity: int) -> tuple[Tensor, ...]:
        """The sections of all ranks, [A * C, width] each. Raises ExchangeError."""
        sheet = self._sheet(self._formats.dispatch, capacity, 0)
        self._wait(self._take(self._groups.dispatch, sheet.buffer.view(-1)), at, "dispatch")
        self._compare(at, sheet.headers)
        rows = (sheet.sections[1] >= 0).any(2).sum()
        self._served.append(Served(at.layer, rows, self._clock.mark(), None))
        return tuple(part.flatten(0, 1) for part in sheet.sections)

    def send(self, at: Round, capacity: int, sum_ND: Tensor) -> None:
        """The sums of what `receive` gave, with the headers that came with it."""
        if at.micro in self._sent:
            before, work = self._sent.pop(at.micro)
            self._wait(work, before, "combine")
        sheet = self._sheet(self._formats.combine, capacity, 1, at.micro)
        sheet.headers.copy_(self._sheet(self._formats.dispatch, capacity, 0).headers)
        sheet.sections[0].copy_(sum_ND.view(self._count, capacity, -1))
        self._served[-1].ended = self._clock.mark()
        self._sent[at.micro] = at, self._give(self._groups.combine, sheet.buffer.view(-1))

    def finish(self) -> list[tuple[int, int, float]]:
        """After the last round, when the device is done: (layer, rows, seconds) of each. Raises
        ExchangeError when a message was not the expected one."""
        if not self._served:
            return []
        wrong = torch.stack([wrong for _, wrong in self._found]).long()
        rows = torch.stack([served.rows for served in self._served]).unsqueeze(1)
        *found, counts = torch.cat([wrong, rows], 1).t().tolist()
        if any(map(any, found)):
            # They find it too, in the replies: which must not be cut off by the end of this epoch.
            for at, work in self._sent.values():
                self._wait(work, at, "combine")
        self._raise_wrong([[*map(bool, each)] for each in zip(*found, strict=True)], 0, "dispatch")
        return [
            (served.layer, count, self._clock.seconds(served.began, served.ended))
            for served, count in zip(self._served, counts, strict=True)
        ]
