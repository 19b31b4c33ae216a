"""Requests through an engine in this process, with the times that a user would see."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import count
from time import perf_counter, process_time

from expertmesh.actors.attention.engine import Engine
from expertmesh.actors.attention.messages import GenerateRequest, KvReport, SamplingParams

PATIENCE_S = 60.0  # with nothing to compute: some load from below is under way


class EngineEnded(RuntimeError):
    """A request has ended with an error, or never would; the message says which and why."""


@dataclass(slots=True)
class Timed:
    """Seconds are from `asked`, by perf_counter; first_cpu_s: what this process computed up to the
    first token, whoever else had the cores. kv: how old tokens were read, None where all were read
    exactly."""

    asked: float
    cpu: float
    first_s: float = 0.0
    first_cpu_s: float = 0.0
    last_s: float = 0.0
    ids: list[int] = field(default_factory=list)
    cached_tokens: int = 0
    kv: KvReport | None = None


class Driver:
    """Steps an engine for greedy requests of a known length, as clients that wait would see it."""

    def __init__(self, engine: Engine, watch: Callable[[], None] = lambda: None) -> None:
        """watch: called after every step."""
        self.engine, self._watch = engine, watch
        self._numbers = count()
        self._open: dict[str, Timed] = {}

    def submit(self, prompt: list[int], tokens: int, kv_mode: str = "", name: str = "") -> Timed:
        """Filled while `run` or `all` steps. tokens: 0 for the prompt alone. Raises what the
        engine's submit raises."""
        name = name or f"request {next(self._numbers)}"
        params = SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True)
        timed = Timed(perf_counter(), process_time())
        self.engine.submit(GenerateRequest(name, prompt, params, kv_mode=kv_mode))
        self._open[name] = timed
        return timed

    def run(self) -> None:
        """Until every request has ended. Raises EngineEnded."""
        while self._open:
            self._step()

    def one(self, prompt: list[int], tokens: int, kv_mode: str = "") -> Timed:
        """Alone. Raises EngineEnded."""
        timed = self.submit(prompt, tokens, kv_mode)
        self.run()
        return timed

    def all(
        self, prompts: Iterator[list[int]], tokens: int, clients: int, kv_mode: str = ""
    ) -> list[Timed]:
        """Every prompt, `clients` at a time: the next is asked when one has its last token. Raises
        EngineEnded."""
        every: list[Timed] = []
        for prompt in prompts:
            every.append(self.submit(prompt, tokens, kv_mode))
            while len(self._open) >= clients:
                self._step()
        self.run()
        return every

    def _step(self) -> None:
        engine = self.engine
        if not engine.has_work and not engine.arrived.wait(PATIENCE_S):
            raise EngineEnded(f"nothing has happened for {PATIENCE_S} s")
        engine.arrived.clear()
        outputs, now = engine.step(), perf_counter()
        self._watch()
        for output in outputs:
            if output.finish_reason in ("error", "abort"):
                raise EngineEnded(f"{output.request_id}: {output.error}")
            timed = self._open[output.request_id]
            if not timed.first_s:
                timed.first_s, timed.first_cpu_s = now - timed.asked, process_time() - timed.cpu
            timed.ids += output.token_ids
            timed.cached_tokens = max(timed.cached_tokens, output.cached_tokens)
            timed.kv = output.kv or timed.kv
            if output.finish_reason is not None:
                timed.last_s = now - timed.asked
                del self._open[output.request_id]
