"""How the benchmark talks to one system under test: a process, JSON lines on its stdin and stdout.

Every system (ours and the peers) answers the same three questions, so that one driver can alternate
between systems that are all alive. A worker runs in its own environment and imports only this file.

  {"op": "score", "ids": [...]} -> {"argmax": [...], "logprob": [...]}, one entry per position
  {"op": "generate", "prompts": [[...]], "new": n} -> Clock.timing; greedy, n new ids for each
  {"op": "facts"} -> versions, threads, storage of the weights
"""

import json
import os
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from typing import Any, Protocol


class System(Protocol):
    def facts(self) -> dict[str, Any]: ...

    def score(self, ids: list[int]) -> dict[str, list[Any]]:
        """For every position: the most likely next id and its natural log-probability."""
        ...

    def generate(self, prompts: list[list[int]], new: int) -> dict[str, Any]:
        """All prompts at once, greedy; a `Clock.timing`."""
        ...


class Clock:
    """Rates of a closed batch. Decoding is the time in which all requests generate: from the last
    one's first id to the first one's end."""

    def __init__(self, requests: int) -> None:
        self._start = time.perf_counter()
        self._requests = self._without_id = requests
        self._ids = 0
        self._first: tuple[float, int] | None = None
        self._end: tuple[float, int] | None = None

    def ids(self, count: int, first_of: int = 0) -> None:
        """`count` ids have come; for `first_of` requests they are the first ones."""
        self._ids += count
        self._without_id -= first_of
        if self._first is None and self._without_id == 0:
            self._first = time.perf_counter(), self._ids

    def finished(self) -> None:
        """A request has all its ids."""
        if self._end is None:
            self._end = time.perf_counter(), self._ids

    def timing(self, ids: Sequence[Sequence[int]]) -> dict[str, Any]:
        """Call when all is done. `ids`: the generated ids of each request."""
        now = time.perf_counter()
        assert self._first is not None and self._end is not None
        (first, before), (end, after) = self._first, self._end
        return {
            "ids": [[int(token) for token in sequence] for sequence in ids],
            "prefill_s": first - self._start,
            "decode_s": end - first,
            "decode_tokens_per_s": (after - before) / (end - first),
            "total_tokens_per_s": self._ids / (now - self._start),
        }


def serve(build: Callable[[dict[str, Any]], System]) -> None:
    """Build the system from the JSON object in argv[1], then answer until stdin closes."""
    # Libraries print on stdout as they like; the answers keep the real one for themselves.
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    try:
        system = build(json.loads(sys.argv[1]))
        print(json.dumps({"ready": True}), file=answers)
        for line in sys.stdin:
            ask = json.loads(line)
            answer = getattr(system, ask.pop("op"))(**ask)
            print(json.dumps(answer), file=answers)
        if hasattr(system, "close"):
            system.close()
    except Exception:
        print(json.dumps({"error": traceback.format_exc()}), file=answers)
        raise
