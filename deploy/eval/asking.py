"""Runs cases through an engine: each text once, everything asked of it after its shared prefix."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from expertmesh.actors.attention.engine import Engine
from expertmesh.actors.attention.messages import GenerateRequest, KvReport, SamplingParams
from expertmesh.deploy.eval.cases import Case, Probe
from expertmesh.deploy.eval.teacher import Teacher, Verdict

PATIENCE_S = 60.0  # with nothing to compute: some load from below is under way


class EngineEnded(RuntimeError):
    """A request has ended with an error, or never would; the message says which and why."""


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

    def __init__(self, engine: Engine, kv_mode: str = "") -> None:
        self.engine, self.kv_mode = engine, kv_mode
        self.teacher = Teacher.of(engine)
        self._open: set[str] = set()

    def ask(self, cases: Iterable[tuple[int, Case]]) -> Iterator[Answer]:
        """cases: with their numbers. Raises EngineEnded when the engine fails or stands still."""
        for number, case in cases:
            if len(case.probes) > 1:  # so that its state is there when several want it at once
                self._submit(f"{number}", case, 0)
                self._run()
            verdicts = []
            for at, probe in enumerate(case.probes):
                verdicts.append(self.teacher.teach(f"{number}.{at}", probe))
                self._submit(f"{number}.{at}", case, len(probe.ids))
            last = self._run()
            for at, (probe, verdict) in enumerate(zip(case.probes, verdicts, strict=True)):
                name = f"{number}.{at}"
                self.teacher.forget(name)
                yield Answer(number, probe, verdict, *last[name])

    def _submit(self, name: str, case: Case, tokens: int) -> None:
        params = SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True)
        self._open.add(name)
        self.engine.submit(GenerateRequest(name, list(case.context), params, kv_mode=self.kv_mode))

    def _run(self) -> dict[str, tuple[int, KvReport | None]]:
        """Until nobody is left: cached tokens and report of each."""
        engine, told = self.engine, dict[str, tuple[int, KvReport | None]]()
        while self._open:
            if not engine.has_work and not engine.arrived.wait(PATIENCE_S):
                raise EngineEnded(f"nothing has happened for {PATIENCE_S} s")
            engine.arrived.clear()
            for output in engine.step():
                if output.finish_reason in ("error", "abort"):
                    raise EngineEnded(f"{output.request_id}: {output.error}")
                cached, kv = told.get(output.request_id, (0, None))
                told[output.request_id] = max(cached, output.cached_tokens), output.kv or kv
                if output.finish_reason is not None:
                    self._open.discard(output.request_id)
        return told
