"""Runs cases through an engine: each text once, everything asked of it after its shared prefix."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from expertmesh.actors.attention.engine import Engine
from expertmesh.actors.attention.messages import KvReport
from expertmesh.deploy.eval.cases import Case, Probe
from expertmesh.deploy.eval.driver import Driver, Timed
from expertmesh.deploy.eval.teacher import Teacher, Verdict


@dataclass(frozen=True, slots=True)
class Answer:
    """case: its number. kv: how old tokens were read, None where all were read exactly."""

    case: int
    probe: Probe
    verdict: Verdict
    cached_tokens: int
    kv: KvReport | None


class Asker:
    """One engine, one mode. The engine's sampler gives way to a Teacher."""

    def __init__(
        self, engine: Engine, kv_mode: str = "", watch: Callable[[], None] = lambda: None
    ) -> None:
        """kv_mode: "" for the engine's own. watch: called after every step."""
        self._kv_mode, self._driver = kv_mode, Driver(engine, watch)
        self._teacher = Teacher.of(engine)

    def ask(self, cases: Iterable[tuple[int, Case]]) -> Iterator[Answer]:
        """cases: with their numbers. Raises EngineEnded when the engine fails or stands still."""
        for number, case in cases:
            context, driver = list(case.context), self._driver
            if len(case.probes) > 1:  # so that its state is there when several want it at once
                driver.submit(context, 0, self._kv_mode)
                driver.run()
            asked: list[tuple[Probe, Verdict, Timed]] = []
            for at, probe in enumerate(case.probes):
                name = f"probe {number}.{at}"
                verdict = self._teacher.teach(name, probe)
                timed = driver.submit(context, len(probe.ids), self._kv_mode, name)
                asked.append((probe, verdict, timed))
            driver.run()
            for at, (probe, verdict, timed) in enumerate(asked):
                self._teacher.forget(f"probe {number}.{at}")
                yield Answer(number, probe, verdict, timed.cached_tokens, timed.kv)
