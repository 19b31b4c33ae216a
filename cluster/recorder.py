"""Recording which experts whole tokens choose, over all attention replicas of a running mesh."""

import contextlib
import threading
import time
from typing import Any

import msgspec
import ray
from ray.exceptions import RayError

from expertmesh.actors.exchange.counting import Trace
from expertmesh.cluster.ledger.recording import assemble
from expertmesh.cluster.membership import Worker
from expertmesh.cluster.traffic import STATS_S, Traffic, snapshots

LOOK_S = 0.1


class RecordingBusy(RuntimeError):
    """A recording is being made; a second one would take its tokens away."""


class NothingRecorded(RuntimeError):
    """No attention replica could say what its tokens chose."""


class Recorder:
    """One recording at a time. Replicas that are lost meanwhile are left out of it."""

    def __init__(self, traffic: Traffic) -> None:
        self._traffic = traffic
        self._busy = threading.Lock()

    def record(self, seconds: float, tokens: int, model: str = "") -> bytes:
        """An .npz as cluster/ledger/recording.py describes it, of at most `tokens` tokens.

        Returns once that many are recorded, or the time is over. Raises RecordingBusy and
        NothingRecorded.
        """
        if not self._busy.acquire(blocking=False):
            raise RecordingBusy("a recording is being made already")
        try:
            return self._record(seconds, tokens, model)
        finally:
            self._busy.release()

    def _record(self, seconds: float, tokens: int, model: str) -> bytes:
        before, began = self._traffic.ask(), time.monotonic()
        workers = list(before.replicas)
        _each(workers, "start_recording", tokens)  # all of them, should the others be idle
        while time.monotonic() - began < seconds:
            time.sleep(LOOK_S)
            if sum(_each(workers, "recorded")) >= tokens:
                break
        answers = _each(workers, "stop_recording")
        after = snapshots(self._traffic.ask())
        if not after:
            raise NothingRecorded("no attention replica answers")
        return assemble(
            snapshots(before),
            after,
            [msgspec.msgpack.decode(answer, type=Trace) for answer in answers],
            self._traffic.placement,
            time.monotonic() - began,
            tokens=tokens,
            model=model,
        ).to_bytes()


def _each(workers: list[Worker], verb: str, *arguments: Any) -> list[Any]:
    """The answers of those that give one in time."""
    calls = [getattr(worker.handle, verb).remote(*arguments) for worker in workers]
    if calls:
        ray.wait(calls, num_returns=len(calls), timeout=STATS_S)
    answers = []
    for call in calls:
        with contextlib.suppress(RayError):
            answers.append(ray.get(call, timeout=0))
    return answers
