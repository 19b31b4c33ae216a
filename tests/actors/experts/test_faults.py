"""When an actor's own failures count as the actor being broken."""

import time
from collections.abc import Callable
from typing import Any

from expertmesh.actors.exchange.base import ExchangeError
from expertmesh.actors.exchange.roster import Roster
from expertmesh.actors.exchange.serve import LayerWork
from expertmesh.actors.experts.serving import FAULTS, Epochs


class FakeServer:
    """Ends at once, after so many GEMMs, with this error."""

    def __init__(self, error: Exception, calls: int) -> None:
        self._error, self.steps, self.version_floor = error, 0, 0
        self.work = {1: LayerWork(calls=calls)}

    def run(self) -> None:
        raise self._error

    def close(self) -> None: ...


def until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 5
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.001)


def end_epochs(*endings: tuple[Exception, int]) -> Epochs:
    servers: list[Any] = [FakeServer(*ending) for ending in endings]
    epochs = Epochs(lambda roster, rank: servers[roster.epoch])
    for number in range(len(servers)):
        epochs.prepare(Roster(number, 1, 1, {1: ((0,),)}, ("", 0)), 1)
        until(lambda number=number: epochs.pulse().epoch == number or bool(epochs.pulse().stuck))
        until(lambda: not epochs._live)
    return epochs


def test_failures_in_a_row_make_the_actor_stuck() -> None:
    fault = RuntimeError("device is gone"), 0
    assert end_epochs(*[fault] * (FAULTS - 1)).pulse().stuck == ""
    stuck = end_epochs(*[fault] * FAULTS).pulse().stuck
    assert f"{FAULTS} times in a row" in stuck and "device is gone" in stuck


def test_what_others_do_and_what_went_well_do_not_count() -> None:
    fault, well = (RuntimeError("odd request"), 0), (RuntimeError("odd request"), 7)
    lost = ExchangeError(0, 1, "dispatch", 3, "closed by peer"), 0
    assert end_epochs(*[lost] * (2 * FAULTS)).pulse().stuck == ""
    assert end_epochs(*[fault] * (FAULTS - 1), well, *[fault] * (FAULTS - 2)).pulse().stuck == ""
