"""An exchange that outlives its epochs: a step goes on in the next one where the last broke.

What is on its way is kept until its sum is here. When the epoch breaks, or another takes over on
purpose, the engine's next call waits for the new epoch, enters it with the first layer this rank
still needs, sends again what was on its way and goes on. The forward pass never unwinds, so no
token is computed twice, lost or doubled; and as sums do not depend on where experts are, the
result is the same bit for bit.
"""

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import TypeVar

from torch import Tensor

from expertmesh.actors.exchange.base import ExchangeError, MisuseError
from expertmesh.actors.exchange.mesh import MeshExchange, Pending
from expertmesh.actors.exchange.roster import Routing

Result = TypeVar("Result")


@dataclass(slots=True)
class Sent:
    """What a dispatch was given, for as long as it may have to be sent again."""

    layer: int
    micro: int
    z_TD: Tensor
    ids_TK: Tensor
    weights_TK: Tensor
    pending: Pending | None = None


@dataclass(slots=True)
class Journey:
    """One step of this rank, over as many epochs as it takes."""

    rows: int
    needs: list[int]  # by micro-batch: the layers from this one on are still to come
    flying: dict[int, Sent] = field(default_factory=dict)  # by micro-batch
    inside: MeshExchange | None = None  # the epoch in which this step is open


class ElasticExchange:
    """Exchange over the active epoch. One engine thread drives it; `offer`, `switch`, `discard`,
    `abort`, `give_up`, `route` and the properties may be used from any thread."""

    def __init__(self, hold_s: float, on_wake: Callable[[], None] | None = None) -> None:
        """hold_s: how long a step waits for the next epoch. on_wake: called when `peer_waiting`
        may have become true."""
        self._hold_s, self._on_wake = hold_s, on_wake
        self._changed = threading.Condition()  # guards all but _journey
        self._prepared: dict[int, MeshExchange] = {}
        self._active: MeshExchange | None = None
        self._epoch = -1
        self._broken: ExchangeError | None = None
        self._ended: str | None = None  # why no epoch is waited for
        self._closed = False
        self._spent = [0.0, 0.0]  # dispatch and combine seconds of earlier epochs
        self._sent = 0  # rows of earlier epochs
        self._held_since: float | None = None
        self._journey: Journey | None = None  # the engine thread's

    # --- the control plane, any thread ----------------------------------------------------------

    def offer(self, exchange: MeshExchange) -> None:
        """A prepared epoch, all ranks of which have met. It waits beside the active one."""
        with self._changed:
            refused = self._closed or exchange.roster.epoch <= self._epoch
            if not refused:
                self._prepared[exchange.roster.epoch] = exchange
        if refused:
            exchange.abort(f"epoch {exchange.roster.epoch} comes too late")
            raise ValueError(f"epoch {exchange.roster.epoch} after epoch {self._epoch}, or closed")

    def switch(self, epoch: int) -> None:
        """Makes a prepared epoch the active one and ends all earlier ones here.

        A step in progress goes on in it. Raises ValueError when it was not offered.
        """
        with self._changed:
            if epoch not in self._prepared:
                raise ValueError(f"epoch {epoch} was not offered, or discarded")
            over = [self._prepared.pop(older) for older in sorted(self._prepared) if older < epoch]
            if self._active is not None:
                over.append(self._active)
                self._spent[0] += self._active.dispatch_s
                self._spent[1] += self._active.combine_s
                self._sent += sum(self._active.rows_sent)
            self._active, self._epoch = self._prepared.pop(epoch), epoch
            self._broken = self._ended = None
            self._changed.notify_all()
        for exchange in over:
            exchange.abort(f"epoch {epoch} has taken over")
        self._wake()

    def discard(self, epoch: int) -> None:
        """Ends a prepared epoch that is not to be used."""
        with self._changed:
            exchange = self._prepared.pop(epoch, None)
        if exchange is not None:
            exchange.abort(f"epoch {epoch} was given up before its first step")

    def abort(self, reason: str, epoch: int | None = None) -> None:
        """Breaks the active epoch now, on every rank; a step in progress waits for the next.

        epoch: does nothing when it is not the active one any more.
        """
        with self._changed:
            exchange = self._active
        if exchange is not None and epoch in (None, exchange.roster.epoch):
            self._break(exchange, ExchangeError(exchange.rank, -1, "open", exchange.step, reason))

    def give_up(self, reason: str) -> None:
        """No next epoch will come: whoever waits for one, now or later, gets an ExchangeError with
        this reason, until a `switch` proves it wrong."""
        with self._changed:
            self._ended = reason
            self._changed.notify_all()

    def route(self, routing: Routing) -> None:
        """See MeshExchange.route; for the active epoch. Raises ValueError."""
        exchange = self._active
        if exchange is None:
            raise ValueError("no epoch is active yet")
        exchange.route(routing)

    def close(self) -> None:
        """Leaves the active epoch and ends the prepared ones; nothing can be used afterwards.

        Between steps the other ranks get a farewell; from inside a step this is an abort.
        """
        with self._changed:
            self._closed, self._ended = True, "the exchange is closed"
            exchange, prepared = self._active, list(self._prepared.values())
            self._prepared.clear()
            self._changed.notify_all()
        for other in prepared:
            other.abort("the exchange is closed")
        if exchange is not None:
            if self._journey is None and self._broken is None:
                exchange.close()
            exchange.abort("the exchange is closed")

    @property
    def epoch(self) -> int:
        """The active epoch; -1 before the first."""
        return self._epoch

    @property
    def broken(self) -> ExchangeError | None:
        """Why the active epoch broke; None while it works and before the first."""
        return self._broken

    @property
    def version(self) -> int:
        """The routing version of the last step in the active epoch; -1 before the first epoch."""
        exchange = self._active
        return -1 if exchange is None else exchange.version

    @property
    def peer_waiting(self) -> bool:
        """The engine must call join_step, see MeshExchange. Never for a broken epoch: there is
        nothing to join until the next one."""
        with self._changed:
            exchange = None if self._closed or self._broken is not None else self._active
        return exchange is not None and exchange.peer_waiting

    @property
    def rows_sent(self) -> list[int]:
        """By expert actor of the active epoch."""
        exchange = self._active
        return [] if exchange is None else exchange.rows_sent

    @property
    def rows_sent_total(self) -> int:
        """To all expert actors, over all epochs."""
        with self._changed:
            return self._sent + sum(self.rows_sent)

    @property
    def held_seconds(self) -> float:
        """How long the engine's thread has been waiting for the next epoch; 0 when it is not."""
        since = self._held_since
        return 0.0 if since is None else time.monotonic() - since

    @property
    def dispatch_s(self) -> float:
        """Over all epochs."""
        with self._changed:
            exchange = self._active
            return self._spent[0] + (0.0 if exchange is None else exchange.dispatch_s)

    @property
    def combine_s(self) -> float:
        """Over all epochs."""
        with self._changed:
            exchange = self._active
            return self._spent[1] + (0.0 if exchange is None else exchange.combine_s)

    # --- the engine's thread --------------------------------------------------------------------

    def begin_step(self, rows: int, micros: int = 1) -> None:
        """See Exchange. Waits for an epoch at most hold_s; raises ExchangeError after that."""
        if self._journey is not None:
            raise self._misuse("open", "begin_step inside a step")
        self._journey = Journey(rows, [-1] * micros)
        self._travel(self._journey)

    def dispatch(
        self, layer: int, z_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor, micro: int = 0
    ) -> Sent:
        journey = self._journey
        if journey is None or not 0 <= micro < len(journey.needs) or micro in journey.flying:
            raise self._misuse("dispatch", f"micro-batch {micro} is in flight or in no step")
        journey.needs[micro] = layer
        exchange = self._travel(journey)
        sent = Sent(layer, micro, z_TD, ids_TK, weights_TK)
        journey.flying[micro] = sent
        # If this fails, combine finds the epoch broken and sends it again.
        self._try(exchange, partial(_send, exchange, sent))
        return sent

    def combine(self, pending: Sent) -> Tensor:
        journey = self._journey
        if journey is None or journey.flying.get(pending.micro) is not pending:
            raise self._misuse("combine", f"micro-batch {pending.micro} is not in flight")
        y_TD: Tensor | None = None
        while y_TD is None:
            exchange = self._travel(journey)
            flying = pending.pending
            assert flying is not None, "travelling sends what is in flight"
            y_TD = self._try(exchange, partial(exchange.combine, flying))
        del journey.flying[pending.micro]
        journey.needs[pending.micro] = pending.layer + 1
        return y_TD

    def end_step(self) -> None:
        """This rank needs nothing more: if the epoch breaks here, the step has still been made."""
        journey = self._journey
        if journey is None or journey.flying:
            raise self._misuse("close", "no step, or a micro-batch never combined")
        self._journey = None
        if journey.inside is not None:
            self._try(journey.inside, journey.inside.end_step)

    def join_step(self) -> None:
        """A step without rows. When the epoch breaks there is nothing to repeat: returns."""
        if self._journey is not None:
            raise self._misuse("open", "join_step inside a step")
        with self._changed:
            exchange = self._active if self._broken is None else None
        if exchange is not None:
            self._try(exchange, exchange.join_step)

    def _travel(self, journey: Journey) -> MeshExchange:
        """The active epoch, with the step open and all that is in flight on its way there.

        Waits for an epoch that works. When none comes the step is gone and an ExchangeError says
        why the last one broke.
        """
        while True:
            exchange = self._await_epoch(journey)
            if journey.inside is exchange:
                return exchange
            journey.inside = None
            if self._try(exchange, partial(_resume, exchange, journey)):
                journey.inside = exchange

    def _await_epoch(self, journey: Journey) -> MeshExchange:
        with self._changed:
            end = time.monotonic() + self._hold_s
            while self._active is None or self._broken is not None or self._closed:
                left = end - time.monotonic()
                if self._ended is not None or left <= 0:
                    break
                self._held_since = self._held_since or time.monotonic()
                self._changed.wait(left)
            self._held_since = None
            if self._active is not None and self._broken is None and not self._closed:
                return self._active
            ended, broken = self._ended, self._broken
        self._journey = None
        why = "no epoch yet" if broken is None else str(broken)
        reason = ended or f"no new epoch within {self._hold_s:g} s; {why}"
        rank, step = (-1, -1) if broken is None else (broken.rank, broken.step)
        raise ExchangeError(rank, min(journey.needs), "hold", step, reason)

    def _try(self, exchange: MeshExchange, call: Callable[[], Result]) -> Result | None:
        """What `call` returns; None when the epoch broke."""
        try:
            return call()
        except MisuseError as error:
            self._journey = None
            self._break(exchange, error)
            raise
        except ExchangeError as error:
            self._break(exchange, error)
            return None

    def _break(self, exchange: MeshExchange, error: ExchangeError) -> None:
        exchange.abort(error.reason)
        # Without its traceback: that would keep the dead epoch's sockets and buffers.
        kept = ExchangeError(error.rank, error.layer, error.phase, error.step, error.reason)
        with self._changed:
            if exchange is self._active and self._broken is None:
                self._broken = kept
            self._changed.notify_all()

    def _misuse(self, phase: str, reason: str) -> MisuseError:
        exchange = self._active
        rank, step = (-1, -1) if exchange is None else (exchange.rank, exchange.step)
        error = MisuseError(rank, -1, phase, step, reason)
        self._journey = None
        if exchange is not None:
            self._break(exchange, error)
        return error

    def _wake(self) -> None:
        if self._on_wake is not None:
            self._on_wake()


def _send(exchange: MeshExchange, sent: Sent) -> None:
    sent.pending = exchange.dispatch(
        sent.layer, sent.z_TD, sent.ids_TK, sent.weights_TK, sent.micro
    )


def _resume(exchange: MeshExchange, journey: Journey) -> bool:
    """Opens the step at the first layer still needed and sends what was in flight, in order."""
    exchange.begin_step(journey.rows, len(journey.needs), min(journey.needs))
    for sent in sorted(journey.flying.values(), key=lambda sent: (sent.layer, sent.micro)):
        _send(exchange, sent)
    return True
