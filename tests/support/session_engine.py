"""An engine with real tiers below it, driven by hand: what a replica's process is, without one."""

import threading
from pathlib import Path
from typing import Any

from expertmesh.actors.attention.engine import Engine
from expertmesh.actors.attention.messages import GenerateRequest, SamplingParams
from expertmesh.actors.attention.settings import EngineSettings
from expertmesh.actors.state.opening import open_tiers
from expertmesh.actors.state.session_messages import SessionAnswer, SessionCall
from expertmesh.actors.state.settings import StateSettings
from tests.support.runner import Runner
from tests.support.state_model import poisoned
from tests.support.state_oracle import Row, tap

# For whatever the store does in the background.
WAIT_S = 60.0


class SessionEngine:
    """Greedy requests of one tenant and what is asked about their sessions."""

    def __init__(
        self,
        runner: Runner,
        folder: Path | None,
        *,
        pages: int,
        slots: int = 4,
        host_bytes: int = 64 << 20,
        disk_bytes: int = 1 << 30,
        step_tokens: int = 512,
    ) -> None:
        disk = {} if folder is None else {"disk": folder, "disk_bytes": disk_bytes}
        state = StateSettings(
            host_bytes=host_bytes, write_timeout_s=WAIT_S, read_timeout_s=WAIT_S,
            write_bytes_per_s=1e9, **disk,
        )  # fmt: skip
        arrived = threading.Event()
        device = poisoned(runner.model, pages, slots, state.snapshots)
        self.store = open_tiers(device.layout, state, arrived.set)
        self.engine = Engine(
            runner.model, device, runner.exchange,
            EngineSettings(state=state, step_tokens=step_tokens), [],
            fingerprint=b"small", store=self.store, arrived=arrived,
        )  # fmt: skip
        self.tap = tap(self.engine)
        self.ids: dict[str, list[int]] = {}
        self.ends: dict[str, int] = {}  # tokens of the prompt that were not computed

    def close(self) -> None:
        self.engine.fail("the test is over")
        if self.store is not None:
            self.store.close()

    def step(self) -> None:
        """One step, or a wait for something to do."""
        if self.engine.has_work:
            for output in self.engine.step():
                assert output.error is None, output.error
                self.ids.setdefault(output.request_id, []).extend(output.token_ids)
                if output.finish_reason is not None:
                    self.ends[output.request_id] = output.cached_tokens
        else:
            assert self.engine.arrived.wait(WAIT_S), "nothing happens"
            self.engine.arrived.clear()

    def turn(self, name: str, prompt: list[int], count: int, session: str) -> tuple[list[int], int]:
        """The answer's tokens, and how many of the prompt's were not computed."""
        params = SamplingParams(max_tokens=count, temperature=0.0)
        self.engine.submit(GenerateRequest(name, prompt, params, tenant="t/", session=session))
        while name not in self.ends:
            self.step()
        return self.ids.pop(name), self.ends.pop(name)

    def rows(self, name: str) -> list[Row]:
        """Logits of each token drawn, in order."""
        return [row for _, row in sorted(self.tap.seen.pop(name).items())]

    def ask(self, verb: Any, session: str = "", target: str = "") -> SessionAnswer:
        call = SessionCall(verb=verb, tenant="t/", session=session, target=target)
        future = self.engine.session(call)
        while not future.done():
            self.step()
        answer = future.result()
        assert answer.problem is None, answer.message
        return answer
