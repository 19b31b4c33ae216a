"""Opening a step: every attention rank tells every other rank what it brings.

All ranks collect the same announcements, one per attention rank and step, and derive the same
plan from them; nobody decides for the others. A rank that has work announces it and waits; an idle
one is woken by the first announcement and joins with its own, of zero rows. When nobody has work,
nothing is sent and every rank is parked in a receive.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from datetime import timedelta
from typing import Any, NamedTuple

import torch
from torch import Tensor

from expertmesh.actors.exchange.base import ExchangeError
from expertmesh.actors.exchange.opening import LEAVE, NO_LAYER, WORDS, Opening, StepPlan
from expertmesh.actors.exchange.process_group import CONTROL_TAG, PARKED, Groups, Where

# A peer that has gone already may leave a farewell unanswered.
LEAVE_LIMIT = timedelta(milliseconds=300)


class Lost(NamedTuple):
    peer: int
    reason: str


class Listeners:
    """A thread per attention rank, parked in a receive for what that rank announces next."""

    def __init__(
        self, groups: Groups, peers: Iterable[int], on_news: Callable[[], None] | None = None
    ) -> None:
        """on_news: called from another thread when a peer opens a step, leaves or is lost, and
        when the epoch is closed here."""
        self._groups, self._on_news = groups, on_news
        self._changed = threading.Condition()
        # A peer may be one step ahead: a step without rounds needs nothing but announcements.
        self._heard: dict[int, deque[Opening]] = {peer: deque() for peer in peers}
        self._lost: Lost | None = None
        groups.on_close.append(self._notify)
        self._threads = [
            threading.Thread(
                target=self._listen, args=(peer,), name=f"exchange-listen-{peer}", daemon=True
            )
            for peer in self._heard
        ]
        for thread in self._threads:
            thread.start()

    @property
    def lost(self) -> Lost | None:
        """The first peer whose connection broke."""
        return self._lost

    @property
    def news(self) -> bool:
        """A peer has announced something, or the epoch is over."""
        with self._changed:
            return self._has_news()

    def join(self, limit_s: float) -> None:
        """Waits for the threads to end; the epoch has been closed. A process that exits while one
        is still inside gloo is aborted by the C++ runtime."""
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(limit_s)

    def collect(self, step: int, parked: bool = False) -> list[Opening]:
        """One opening of every peer, or a single farewell. Raises ExchangeError.

        parked: wait for the first one as long as it takes; the others must be close behind.
        """
        with self._changed:
            while parked and not self._has_news():
                self._changed.wait()
            end = time.monotonic() + self._groups.deadline.total_seconds()
            while self._lost is None and not self._groups.closed:
                heads = [heard[0] for heard in self._heard.values() if heard]
                for opening in heads:
                    if opening.kind == LEAVE:
                        return [opening]
                left = end - time.monotonic()
                if len(heads) == len(self._heard) or left <= 0 or not self._changed.wait(left):
                    break
            if all(self._heard.values()):
                return [heard.popleft() for heard in self._heard.values()]
            missing = next(peer for peer, heard in self._heard.items() if not heard)
            lost = self._lost
        raise self._failure(lost, missing, step)

    def _failure(self, lost: Lost | None, missing: int, step: int) -> ExchangeError:
        if lost is not None:
            self._groups.close()
            return Where(lost.peer, -1, "open", step).error(lost.reason)
        reason = "pair closure" if self._groups.closed else "Timed out"
        return self._groups.lost(Where(missing, -1, "open", step), RuntimeError(reason))

    def _has_news(self) -> bool:
        heard = any(self._heard.values())
        return heard or self._lost is not None or self._groups.closed

    def _notify(self) -> None:
        with self._changed:
            self._changed.notify_all()
        if self._on_news is not None:
            self._on_news()

    def _listen(self, peer: int) -> None:
        message = torch.zeros(WORDS, dtype=torch.int64)
        while True:
            opening: Opening | None = None
            try:
                work = self._groups.receive(message, peer, CONTROL_TAG)
                self._groups.wait(work, Where(peer, -1, "open", -1), PARKED)
                opening = Opening.read(message)
            except ExchangeError as error:
                lost = Lost(peer, error.reason)
            except RuntimeError as error:
                lost = Lost(peer, self._groups.lost(Where(peer, -1, "open", -1), error).reason)
            with self._changed:
                if opening is not None:
                    self._heard[peer].append(opening)
                elif self._lost is None:
                    self._lost = lost
            self._notify()
            if opening is None or opening.kind == LEAVE:
                return


class AttentionControl:
    """Announces own steps and listens for those of the other attention ranks."""

    def __init__(
        self,
        groups: Groups,
        on_wake: Callable[[], None] | None = None,
        tell_experts: Callable[[Tensor], None] | None = None,
    ) -> None:
        """tell_experts: sends an announcement to all expert ranks, where not the group does."""
        self._groups, self._tell_experts = groups, tell_experts
        roster, rank = groups.roster, groups.rank
        self._others = [peer for peer in range(roster.attention) if peer != rank]
        others = roster.size if tell_experts is None else roster.attention
        self._all = [peer for peer in range(others) if peer != rank]
        self._out = torch.zeros(WORDS, dtype=torch.int64)
        self._sends: list[tuple[int, Any]] = []
        self._step = -1
        self.listeners = Listeners(groups, self._others, on_wake)

    @property
    def step(self) -> int:
        """The last step this rank has opened; -1 before the first."""
        return self._step

    def open(
        self, rows: int, micros: int, max_rows: int, version: int, first_layer: int
    ) -> StepPlan:
        """Enters the next step together with all other attention ranks. Raises ExchangeError."""
        self._step += 1
        groups, step = self._groups, self._step
        epoch, rank = groups.roster.epoch, groups.rank
        if groups.closed:
            raise groups.lost(Where(rank, -1, "open", step), RuntimeError("pair closure"))
        own = Opening(epoch, step, rank, rows, micros, version, first_layer)
        self._announce(own)
        openings = [own]
        if self._others:
            got = self.listeners.collect(step)
            if got[0].kind == LEAVE:
                groups.close()
                name = groups.roster.name(got[0].rank)
                raise Where(got[0].rank, -1, "open", step).error(f"{name} has left the epoch")
            for peer, opening in zip(self._others, got, strict=True):
                check_opening(groups, opening, Where(peer, -1, "open", step))
            openings += got
        return StepPlan.of(openings, max_rows)

    def leave(self) -> None:
        """Tells every rank that this one ends the epoch on purpose."""
        epoch, rank = self._groups.roster.epoch, self._groups.rank
        self._announce(Opening(epoch, -1, rank, 0, 0, 0, NO_LAYER, LEAVE))
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


class ExpertControl:
    """Parks until an attention rank opens a step."""

    def __init__(self, groups: Groups, collect: Callable[[int], list[Opening]]) -> None:
        """collect: waits for the openings of a step, see Listeners.collect."""
        self._groups, self._collect = groups, collect
        self._step = -1

    def next_step(self, max_rows: int) -> StepPlan | None:
        """The plan of the next step; None when an attention rank has left. Raises ExchangeError."""
        self._step += 1
        openings = self._collect(self._step)
        if openings[0].kind == LEAVE:
            return None
        for peer, opening in enumerate(openings):
            check_opening(self._groups, opening, Where(peer, -1, "open", self._step))
        return StepPlan.of(openings, max_rows)


def check_opening(groups: Groups, got: Opening, where: Where) -> None:
    """Every rank must be about to enter the same step of the same epoch."""
    if (got.epoch, got.step, got.rank) != (groups.roster.epoch, where.step, where.peer):
        groups.close()
        expected = f"epoch {groups.roster.epoch}, step {where.step}, rank {where.peer}"
        found = f"epoch {got.epoch}, step {got.step}, rank {got.rank}"
        raise where.error(f"header mismatch: expected {expected}, got {found}")
