"""How the benchmark talks to one system under test: a process, JSON lines on its stdin and stdout.

Every system (ours and the peers) answers the same three questions, so that one driver can alternate
between systems that are all alive. A worker runs in its own environment and imports only this file.

  {"op": "score", "ids": [...]}            -> {"argmax": [...], "logprob": [...]}   per prompt position
  {"op": "generate", "prompts": [[...]], "new": n} -> Timing   greedy, exactly n new ids for each
  {"op": "facts"}                          -> versions, threads, storage of the weights
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
    """The two phases of a closed batch: until every request has its first id, and after that."""

    def __init__(self) -> None:
        self.start = time.perf_counter()
        self.first = 0.0

    def all_have_first(self) -> None:
        self.first = time.perf_counter()

    def timing(self, ids: Sequence[Sequence[int]]) -> dict[str, Any]:
        """`decode_tokens_per_s` counts the ids after each request's first one."""
        end = time.perf_counter()
        after_first = sum(len(sequence) - 1 for sequence in ids)
        total = sum(len(sequence) for sequence in ids)
        return {
            "ids": [list(map(int, sequence)) for sequence in ids],
            "prefill_s": self.first - self.start,
            "decode_s": end - self.first,
            "decode_tokens_per_s": after_first / (end - self.first),
            "total_tokens_per_s": total / (end - self.start),
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
    except Exception:
        print(json.dumps({"error": traceback.format_exc()}), file=answers)
        raise
