"""The own load generator: streamed completions from a fixed number of clients, counted strictly.

A request is complete when its stream brings a finish_reason and then [DONE]. A stream that just
stops looks like success to most clients; here it is a failure.
"""

import http.client
import json
import statistics
import threading
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from expertmesh.deploy.cost import server

SAMPLE_SECONDS = 0.5
PROMPTS = (
    "Once upon a time there was a river that",
    "The three most useful things in a kitchen are",
    "Explain to a child why the sky is blue:",
    "A letter to a friend who has moved away:",
)


@dataclass(frozen=True, slots=True)
class Plan:
    """requests in all, at most `concurrency` of them at a time; prompts are taken in turn."""

    url: str
    model: str
    requests: int
    concurrency: int
    max_tokens: int
    prompts: Sequence[str]
    timeout_s: float


@dataclass(frozen=True, slots=True)
class Answer:
    """failure: why it is not complete, "" if it is. tokens: (prompt, generated) as the server
    counts them, None where it does not say. first_token_s: from sending to the first text."""

    failure: str
    tokens: tuple[int, int] | None = None
    first_token_s: float | None = None


@dataclass(frozen=True, slots=True)
class Outcome:
    """Of all requests. peak_memory: (bytes, of what) while they ran."""

    answers: list[Answer]
    seconds: float
    peak_memory: tuple[int, server.MemoryOf] | None

    @property
    def failures(self) -> dict[str, int]:
        return dict(Counter(one.failure for one in self.answers if one.failure))

    @property
    def complete(self) -> list[Answer]:
        return [one for one in self.answers if not one.failure]

    def first_token(self) -> tuple[float, float] | None:
        """(median, 99th percentile) of the complete ones."""
        taken = sorted(one.first_token_s for one in self.complete if one.first_token_s is not None)
        if not taken:
            return None
        return statistics.median(taken), taken[min(int(len(taken) * 0.99), len(taken) - 1)]


def run(plan: Plan) -> Outcome:
    """Sends everything and waits for all."""
    with _MemoryWatch(plan.url) as memory:
        began = time.perf_counter()
        with ThreadPoolExecutor(plan.concurrency, "load") as clients:
            answers = list(clients.map(lambda at: ask(plan, at), range(plan.requests)))
        seconds = time.perf_counter() - began
    return Outcome(answers, seconds, memory.peak)


def ask(plan: Plan, at: int) -> Answer:
    """One request. Never raises: whatever happens is a reason."""
    body = {
        "model": plan.model,
        "prompt": plan.prompts[at % len(plan.prompts)],
        "max_tokens": plan.max_tokens,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    parts = urlsplit(plan.url)
    kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
    connection = kind(parts.hostname or "", parts.port, timeout=plan.timeout_s)
    try:
        sent = time.perf_counter()
        head = {"content-type": "application/json", **server.headers()}
        path = parts.path.rstrip("/") + "/v1/completions"
        connection.request("POST", path, json.dumps(body).encode(), head)
        response = connection.getresponse()
        if response.status != 200:
            response.read(10_000)
            return Answer(f"HTTP {response.status}")
        return _read(response, sent, sent + plan.timeout_s)
    except TimeoutError:
        return Answer("timeout")
    except (OSError, http.client.HTTPException):
        return Answer("connection lost")
    except (ValueError, LookupError, TypeError, AttributeError):
        return Answer("not an event stream")
    finally:
        connection.close()


def _read(response: http.client.HTTPResponse, sent: float, deadline: float) -> Answer:
    finished, first, tokens = False, None, None
    for line in response:
        if time.perf_counter() > deadline:
            return Answer("timeout")
        if not line.startswith(b"data:"):
            continue
        data = line[5:].strip()
        if data == b"[DONE]":
            return Answer("" if finished else "no finish_reason", tokens, first)
        event: Any = json.loads(data)
        if not isinstance(event, dict) or "error" in event:
            return Answer("error in the stream")
        for choice in event.get("choices") or ():
            finished = finished or choice.get("finish_reason") is not None
            if first is None and choice.get("text"):
                first = time.perf_counter() - sent
        if usage := event.get("usage"):
            tokens = int(usage["prompt_tokens"]), int(usage["completion_tokens"])
    return Answer("no [DONE]" if finished else "stream cut")


class _MemoryWatch:
    """Looks at the server's memory now and then, in a thread; `peak` is the most it has seen."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="memory-watch", daemon=True)
        self.peak: tuple[int, server.MemoryOf] | None = None

    def __enter__(self) -> "_MemoryWatch":
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._stop.set()
        self._thread.join()
        self._look()

    def _run(self) -> None:
        while not self._stop.wait(SAMPLE_SECONDS):
            self._look()

    def _look(self) -> None:
        seen = server.memory(self._url)
        if seen is not None and (self.peak is None or seen[0] > self.peak[0]):
            self.peak = seen
