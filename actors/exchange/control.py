"""Opening a step: every attention rank tells every other rank how many rows it brings.

All ranks collect the same announcements, one per attention rank and step, and derive the same
plan from them; nobody decides for the others. A rank that has work announces it and waits; an idle
one is woken by the first announcement and joins with its own, of zero rows. When nobody has work,
nothing is sent and every rank is parked in a receive.
"""

import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, NamedTuple

import torch
from torch import Tensor

from expertmesh.actors.exchange.base import ExchangeError
from expertmesh.actors.exchange.process_group import CONTROL_TAG, PARKED, Groups, Where
from expertmesh.actors.exchange.wire import MAGIC, Round

OPEN, LEAVE = 1, 2
WORDS = 8
# A peer that has gone already may leave a farewell unanswered.
LEAVE_LIMIT = timedelta(milliseconds=300)
# Padded messages come in few sizes, so that their buffers are made once.
SMALLEST_CAPACITY = 8


class Opening(NamedTuple):
    """One announcement. Attention rank `rank` enters `step` with `rows` in `micros` parts."""

    epoch: int
    step: int
    rank: int
    rows: int
    micros: int
    kind: int = OPEN

    def write(self, message: Tensor) -> None:
        message.copy_(torch.tensor([MAGIC, *self, 0]))

    @staticmethod
    def read(message: Tensor) -> "Opening":
        magic, *fields, _ = message.tolist()
        return Opening(*fields) if magic == MAGIC else Opening(-1, -1, -1, 0, 0)


@dataclass(frozen=True, slots=True)
class StepPlan:
    """What all ranks of an epoch agree on before the first row travels.

    capacity: rows that one padded message holds. A layer takes micros x chunks rounds.
    """

    epoch: int
    step: int
    micros: int
    chunks: int
    capacity: int

    @staticmethod
    def of(openings: list[Opening], max_rows: int) -> "StepPlan":
        rows = max(opening.rows for opening in openings)
        micros = max(opening.micros for opening in openings)
        capacity = SMALLEST_CAPACITY
        while capacity < min(rows, max_rows):
            capacity *= 2
        chunks = max(1, -(-rows // max_rows))
        first = openings[0]
        return StepPlan(first.epoch, first.step, micros, chunks, min(capacity, max_rows))

    def rounds(self, layers: tuple[int, ...]) -> Iterator[Round]:
        """Every round of the step in its order."""
        for layer in layers:
            for micro in range(self.micros):
                for chunk in range(self.chunks):
                    yield Round(self.epoch, self.step, layer, micro, chunk)


class AttentionControl:
    """Announces own steps and listens for those of the other attention ranks.

    One thread per other attention rank is parked in a receive. `on_wake` is called from such a
    thread when a peer opens a step, leaves or is lost.
    """

    def __init__(
        self,
        groups: Groups,
        on_wake: Callable[[], None] | None = None,
        tell_experts: Callable[[Tensor], None] | None = None,
    ) -> None:
        """tell_experts: sends an announcement to all expert ranks, where not the group does."""
        self._groups, self._on_wake, self._tell_experts = groups, on_wake, tell_experts
        roster, rank = groups.roster, groups.rank
        self._others = [peer for peer in range(roster.attention) if peer != rank]
        others = roster.size if tell_experts is None else roster.attention
        self._all = [peer for peer in range(others) if peer != rank]
        self._out = torch.zeros(WORDS, dtype=torch.int64)
        self._sends: list[tuple[int, Any]] = []
        self._changed = threading.Condition()
        self._opened: dict[int, Opening] = {}  # guarded by _changed, like the next two
        self._lost: ExchangeError | None = None
        self._step = -1
        for peer in self._others:
            name = f"exchange-listen-{peer}"
            threading.Thread(target=self._listen, args=(peer,), name=name, daemon=True).start()

    @property
    def step(self) -> int:
        """The last step this rank has opened; -1 before the first."""
        return self._step

    @property
    def peer_waiting(self) -> bool:
        """Another attention rank has opened a step that this one has not joined yet."""
        with self._changed:
            return bool(self._opened) or self._lost is not None or self._groups.closed

    def wake(self) -> None:
        """Lets whoever waits for other ranks look again."""
        with self._changed:
            self._changed.notify_all()
        if self._on_wake is not None:
            self._on_wake()

    def open(self, rows: int, micros: int, max_rows: int) -> StepPlan:
        """Enters the next step together with all other attention ranks. Raises ExchangeError."""
        self._step += 1
        if self._groups.closed:
            where = Where(self._groups.rank, -1, "open", self._step)
            raise self._groups.lost(where, RuntimeError("pair closure"))
        own = Opening(self._groups.roster.epoch, self._step, self._groups.rank, rows, micros)
        self._announce(own)
        return StepPlan.of([own, *self._collect()], max_rows)

    def leave(self) -> None:
        """Tells every rank that this one ends the epoch on purpose."""
        self._announce(Opening(self._groups.roster.epoch, -1, self._groups.rank, 0, 0, LEAVE))
        self._settle(LEAVE_LIMIT)

    def _announce(self, opening: Opening) -> None:
        self._settle()
        opening.write(self._out)
        if self._tell_experts is not None:
            self._tell_experts(self._out)
        peer = -1
        try:
            for peer in self._all:
                work = self._groups.send(self._out, peer, CONTROL_TAG)
                self._sends.append((peer, work))
        except RuntimeError as error:
            raise self._groups.lost(Where(peer, -1, "open", self._step), error) from error

    def _settle(self, limit: timedelta | None = None) -> None:
        """The buffer may be written again once the last announcement has gone out."""
        sends, self._sends = self._sends, []
        for peer, work in sends:
            self._groups.wait(work, Where(peer, -1, "open", self._step), limit)

    def _collect(self) -> list[Opening]:
        end = time.monotonic() + self._groups.deadline.total_seconds()
        with self._changed:
            while len(self._opened) < len(self._others) and self._lost is None:
                left = end - time.monotonic()
                if left <= 0 or self._groups.closed or not self._changed.wait(left):
                    break
            got, self._opened = self._opened, {}
            lost = self._lost
        if lost is not None:
            self._groups.close()
            raise lost
        for peer in self._others:
            where = Where(peer, -1, "open", self._step)
            if peer not in got:
                raise self._groups.lost(where, RuntimeError("Timed out"))
            check_opening(self._groups, got[peer], where)
        return [got[peer] for peer in self._others]

    def _listen(self, peer: int) -> None:
        message = torch.zeros(WORDS, dtype=torch.int64)
        while True:
            where = Where(peer, -1, "open", self._step)
            lost = None
            try:
                work = self._groups.receive(message, peer, CONTROL_TAG)
                self._groups.wait(work, where, PARKED)
                opening = Opening.read(message)
                if opening.kind == LEAVE:
                    lost = where.error(f"{self._groups.roster.name(peer)} has left the epoch")
            except RuntimeError as error:
                lost = (
                    error if isinstance(error, ExchangeError) else self._groups.lost(where, error)
                )
            with self._changed:
                if lost is None:
                    self._opened[peer] = opening
                elif self._lost is None:
                    self._lost = lost
                self._changed.notify_all()
            if self._on_wake is not None:
                self._on_wake()
            if lost is not None:
                return


class ExpertControl:
    """Parks until an attention rank opens a step."""

    def __init__(
        self, groups: Groups, hear: Callable[[int, Tensor, Where, bool], None] | None = None
    ) -> None:
        """hear: receives an announcement of an attention rank, where not the group does; its last
        argument says whether to park."""
        self._groups, self._hear = groups, hear
        self._peers = range(groups.roster.attention)
        self._messages = [torch.zeros(WORDS, dtype=torch.int64) for _ in self._peers]
        self._posted: list[Any] = []
        self._step = -1
        self._post()

    def next_step(self, max_rows: int) -> StepPlan | None:
        """The plan of the next step; None when an attention rank has left. Raises ExchangeError."""
        self._step += 1
        openings = []
        for peer in self._peers:
            where = Where(peer, -1, "open", self._step)
            # Parked on the first; every attention rank announces, so the others are close behind.
            parked = peer == 0
            if self._hear is not None:
                self._hear(peer, self._messages[peer], where, parked)
            else:
                self._groups.wait(self._posted[peer], where, PARKED if parked else None)
            opening = Opening.read(self._messages[peer])
            if opening.kind == LEAVE:
                return None
            check_opening(self._groups, opening, where)
            openings.append(opening)
        self._post()
        return StepPlan.of(openings, max_rows)

    def _post(self) -> None:
        if self._hear is not None:
            return
        try:
            self._posted = [
                self._groups.receive(message, peer, CONTROL_TAG)
                for peer, message in zip(self._peers, self._messages, strict=True)
            ]
        except RuntimeError as error:
            raise self._groups.lost(Where(0, -1, "open", self._step), error) from error


def check_opening(groups: Groups, got: Opening, where: Where) -> None:
    """Every rank must be about to enter the same step of the same epoch."""
    if (got.epoch, got.step, got.rank) != (groups.roster.epoch, where.step, where.peer):
        groups.close()
        expected = f"epoch {groups.roster.epoch}, step {where.step}, rank {where.peer}"
        found = f"epoch {got.epoch}, step {got.step}, rank {got.rank}"
        raise where.error(f"header mismatch: expected {expected}, got {found}")
