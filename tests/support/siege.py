"""A running server under streaming load, faults done to its processes, and what must come of it.

Every request asks for greedy text whose undisturbed answer is known; whatever happens to the
processes, each stream must deliver exactly that answer.
"""

import contextlib
import itertools
import json
import os
import random
import signal
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import openai

Status = dict[str, Any]

PROMPTS = (
    "The cat sat on", "Once upon a time", "In the beginning", "A long journey", "She opened the",
    "The king said", "It was a dark", "When the rain", "My dear friend", "The old house",
    "Far away in", "He took the", "There was once", "The sea was", "One morning the", "All at once",
)  # fmt: skip


@dataclass
class Fault:
    """What was done, and how soon the mesh noticed and served again, in seconds."""

    kind: str
    actor: str
    noticed_s: float | None = None
    served_s: float | None = None  # until the first token after it, over all streams
    longest_gap_s: float = 0.0


@dataclass
class Result:
    """Of one storm of streams. wrong: (prompt, wanted, got); failed: error texts."""

    streams: int = 0
    tokens: int = 0
    wrong: list[tuple[str, str, str]] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)


class Siege:
    """The client side: url of a server that runs on this machine."""

    def __init__(self, url: str, model: str = "nano", tokens: int = 48, streams: int = 16) -> None:
        self.url, self.model, self.tokens = url, model, tokens
        self.prompts = [f"{PROMPTS[i % len(PROMPTS)]}{' and' * (i // 16)}" for i in range(streams)]
        self.client = openai.OpenAI(
            base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=120.0
        )
        self.expected: dict[str, str] = {}
        self._arrivals: list[float] = []
        self._lock = threading.Lock()

    # --- the server's own word ------------------------------------------------------------------

    def status(self) -> Status:
        with urllib.request.urlopen(f"{self.url}/mesh", timeout=10) as answer:
            status: Status = json.load(answer)
            return status

    def wait(self, condition: Callable[[Status], bool], limit_s: float = 60.0) -> Status:
        end, status = time.monotonic() + limit_s, {}
        while time.monotonic() < end:
            with contextlib.suppress(urllib.error.URLError, TimeoutError):
                status = self.status()
                if condition(status):
                    return status
            time.sleep(0.05)
        raise AssertionError(f"not within {limit_s:g} s: {json.dumps(status)}")

    def wait_whole(self, limit_s: float = 90.0) -> Status:
        """Until the mesh is as large as it should be, and nobody is about to leave."""

        def whole(status: Status) -> bool:
            desired = status["desired"]
            return (
                status["state"] == "ready"
                and len(status["attention"]) == desired["attention"]
                and len(status["experts"]) == desired["experts"]
                and not any(m["leaving"] for m in status["attention"] + status["experts"])
            )

        return self.wait(whole, limit_s)

    def post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        request = urllib.request.Request(
            f"{self.url}{path}",
            json.dumps(body).encode(),
            {"content-type": "application/json"},
            method="POST",
        )
        with urllib.request.urlopen(request, timeout=30) as answer:
            result: dict[str, Any] = json.load(answer)
            return result

    # --- streams --------------------------------------------------------------------------------

    def learn(self) -> None:
        """The undisturbed answers."""
        result = self.storm(lambda: None, check=False)
        assert not result.failed, result.failed

    def storm(self, meanwhile: Callable[[], Any], check: bool = True) -> Result:
        """All prompts as streams at once, and `meanwhile` once tokens flow; returns at the end."""
        result, answers = Result(), dict[str, str]()
        self._arrivals = []
        threads = [
            threading.Thread(target=self._stream, args=(prompt, answers, result), daemon=True)
            for prompt in self.prompts
        ]
        for thread in threads:
            thread.start()
        self._wait_tokens(len(self.prompts))
        meanwhile()
        for thread in threads:
            thread.join(180.0)
            assert not thread.is_alive(), "a stream hangs"
        if not check:
            self.expected = answers
        for prompt in self.prompts:
            wanted, got = self.expected.get(prompt, ""), answers.get(prompt, "")
            if got != wanted:
                result.wrong.append((prompt, wanted, got))
        return result

    def _stream(self, prompt: str, answers: dict[str, str], result: Result) -> None:
        text = ""
        try:
            stream = self.client.completions.create(
                model=self.model,
                prompt=prompt,
                max_tokens=self.tokens,
                temperature=0.0,
                stream=True,
                stream_options={"include_usage": True},
                extra_body={"ignore_eos": True},
            )
            usage = None
            for chunk in stream:
                usage = chunk.usage or usage
                if chunk.choices and chunk.choices[0].text:
                    text += chunk.choices[0].text
                    with self._lock:
                        self._arrivals.append(time.monotonic())
            assert usage is not None and usage.completion_tokens == self.tokens, usage
            with self._lock:
                result.tokens += usage.completion_tokens
        except Exception as error:
            with self._lock:
                result.failed.append(f"{type(error).__name__}: {error}")
        with self._lock:
            answers[prompt] = text
            result.streams += 1

    def _wait_tokens(self, count: int, limit_s: float = 60.0) -> None:
        end = time.monotonic() + limit_s
        while len(self._arrivals) < count and time.monotonic() < end:
            time.sleep(0.002)

    # --- faults ---------------------------------------------------------------------------------

    def harm(self, kind: str, member: Status) -> Fault:
        """kind: kill | stop, of the member's process. Returns once tokens flow again."""
        before = self.status()["losses"]
        number = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}[kind]
        fault, at = Fault(kind, member["actor"]), time.monotonic()
        os.kill(member["pid"], number)
        with contextlib.suppress(AssertionError):
            self.wait(lambda status: status["losses"] > before, 15.0)
            fault.noticed_s = time.monotonic() - at
        end = at + 30.0
        while fault.served_s is None and time.monotonic() < end:
            # Tokens that were on their way at the moment of the fault do not count.
            fault.served_s = next((t - at for t in list(self._arrivals) if t > at + 0.1), None)
            time.sleep(0.005)
        return fault

    def gap(self, fault_at: float) -> float:
        """The longest time without any token from a moment on, in seconds."""
        times = sorted([fault_at, *[t for t in self._arrivals if t > fault_at]])
        return max((b - a for a, b in itertools.pairwise(times)), default=0.0)


def random_fault(draw: random.Random, status: Status) -> tuple[str, Status]:
    """Whom to harm and how: expert actors twice as often as attention replicas."""
    pools: Sequence[list[Status]] = [status["experts"], status["experts"], status["attention"]]
    members = draw.choice(pools)
    return draw.choice(["kill", "kill", "stop"]), draw.choice(members)
