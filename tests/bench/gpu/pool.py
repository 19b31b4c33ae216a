"""Runs the items of a section in processes of their own.

A fault on the device (an illegal address, say) spoils its process for good, and a kernel that hangs
cannot be interrupted: such a process is ended and replaced, and the next item goes on in a new one.
"""

import multiprocessing
import os
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from typing import Any

from tests.bench.gpu.plan import Clock, Outcome, Section

Run = Callable[[str, str], Any]  # (section, item) -> result, JSON-able

# A new process imports torch and opens the device before it is ready.
START_SECONDS = 90.0
# What a running item may take beyond the end of its section.
GRACE_SECONDS = 15.0
READY = "ready"
# Key of a result: why no graph of a call could be recorded.
NO_GRAPH = "no_graph"


class Worker:
    """One process. `item`: what it works on, until `deadline`. It may be asked before it is ready;
    what an item may take counts from then on."""

    def __init__(self, prepare: Callable[[], Run]) -> None:
        context = multiprocessing.get_context("spawn")
        self.pipe, far_end = context.Pipe()
        self.process = context.Process(target=_serve, args=(far_end, prepare), daemon=True)
        self.process.start()
        far_end.close()
        self.ready = False
        self.item, self.deadline, self._seconds = "", 0.0, 0.0

    def begin(self, section: Section, item: str, latest: float) -> None:
        self.item, self._seconds = item, min(section.patience, latest - time.monotonic())
        self.deadline = time.monotonic() + self._seconds + (0.0 if self.ready else START_SECONDS)
        self.pipe.send((section.name, item))

    def is_ready(self) -> None:
        self.ready, self.deadline = True, time.monotonic() + self._seconds

    def end(self) -> None:
        self.process.kill()
        self.process.join()
        self.pipe.close()


class Pool:
    """Workers that live from one section to the next; `prepare` runs first in each of them."""

    def __init__(self, prepare: Callable[[], Run]) -> None:
        self._prepare = prepare
        self._idle: list[Worker] = []

    def run(self, section: Section, clock: Clock) -> Outcome:
        """Every item of the section that the time allows."""
        outcome, begin = Outcome(), time.monotonic()
        latest = clock.section_end(section)
        waiting, busy = list(section.items), list[Worker]()
        self._keep(section.workers)
        while waiting or busy:
            while waiting and len(busy) < section.workers:
                if time.monotonic() >= latest:
                    outcome.skipped += waiting
                    waiting = []
                    break
                worker = self._idle.pop() if self._idle else Worker(self._prepare)
                worker.begin(section, waiting.pop(0), latest + GRACE_SECONDS)
                busy.append(worker)
            busy = self._collect(busy, outcome)
        outcome.seconds = round(time.monotonic() - begin, 2)
        return outcome

    def close(self) -> None:
        self._keep(0)

    def _keep(self, count: int) -> None:
        while len(self._idle) > count:
            self._idle.pop().end()

    def _collect(self, busy: list[Worker], outcome: Outcome) -> list[Worker]:
        """Waits for news; returns who is still at work."""
        if not busy:
            return busy
        left = min(worker.deadline for worker in busy) - time.monotonic()
        ready = wait([worker.pipe for worker in busy], timeout=max(0.0, left))
        still: list[Worker] = []
        for worker in busy:
            if worker.pipe in ready:
                if not self._note(worker, outcome):
                    still.append(worker)
            elif time.monotonic() >= worker.deadline:
                outcome.failed[worker.item] = "ended: no result within its time"
                worker.end()
            else:
                still.append(worker)
        return still

    def _note(self, worker: Worker, outcome: Outcome) -> bool:
        """Whether the worker is done with its item."""
        try:
            news = worker.pipe.recv()
        except EOFError:
            worker.process.join()
            outcome.failed[worker.item] = f"its process ended: {worker.process.exitcode}"
            worker.end()
            return True
        if news == READY:
            worker.is_ready()
            return False
        result, failure, healthy = news
        if failure:
            outcome.failed[worker.item] = failure
        else:
            outcome.results[worker.item] = result
        if healthy:
            self._idle.append(worker)
        else:
            worker.end()
        return True


def run_here(section: Section, clock: Clock, run: Run) -> Outcome:
    """The same in this process: for machines where nothing can be spoiled."""
    outcome, begin = Outcome(), time.monotonic()
    latest = clock.section_end(section)
    for item in section.items:
        if time.monotonic() >= latest:
            outcome.skipped.append(item)
            continue
        try:
            outcome.results[item] = run(section.name, item)
        except Exception:
            outcome.failed[item] = traceback.format_exc()
    outcome.seconds = round(time.monotonic() - begin, 2)
    return outcome


def _serve(pipe: Connection, prepare: Callable[[], Run]) -> None:
    # The parent's threads would be as many again in each of its workers.
    os.environ.setdefault("OMP_NUM_THREADS", "2")
    try:
        run = prepare()
    except Exception:
        pipe.send((None, traceback.format_exc(), False))
        return
    pipe.send(READY)
    while True:
        try:
            section, item = pipe.recv()
        except EOFError:
            return
        try:
            result = run(section, item)
            pipe.send((result, "", not spoiled(result)))
        except Exception as error:
            pipe.send((None, traceback.format_exc(), not _is_fault(error)))


def spoiled(result: Any) -> bool:
    """Whether the process may still think that it records a graph: a recording broke off."""
    return isinstance(result, dict) and NO_GRAPH in result


def _is_fault(error: Exception) -> bool:
    """Whether the device context may be lost."""
    text = str(error).lower()
    return "cuda" in text or "out of memory" in text or "device-side" in text
