"""Whether a grammar compiles, found out in another process, in bounded time."""

import hashlib
import select
import subprocess
import sys
import threading
import time
import weakref
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor

import msgspec

from expertmesh.actors.constraint.spec import Constraint
from expertmesh.actors.constraint.vocabulary import Vocabulary
from expertmesh.actors.constraint.worker import read_frame, write_frame

LIMIT_S = 5.0
START_S = 60.0  # of the process; a loaded machine is slow at that
WORKERS = 2
REMEMBERED = 1024

CRASHED = "is nested too deeply or too large to be compiled"


class TrialUnavailable(RuntimeError):
    """No verdict: the compiling process does not start, or all are busy for too long."""


class Trials:
    """Verdicts of at most WORKERS processes, which start when they are first needed. One that
    crashes or takes too long is replaced; that verdict concerns its grammar alone."""

    def __init__(self, vocabulary: Vocabulary, limit_s: float = LIMIT_S) -> None:
        self._first = msgspec.msgpack.encode(vocabulary)
        self._limit_s = limit_s
        self._known: OrderedDict[bytes, str] = OrderedDict()  # by digest: texts are long
        self._lock = threading.Lock()
        self._idle: list[_Worker] = []
        self.threads = ThreadPoolExecutor(WORKERS, "grammar-trial")

    def known(self, constraint: Constraint) -> str | None:
        """The verdict if there is one already."""
        digest = _digest(constraint)
        with self._lock:
            if digest in self._known:
                self._known.move_to_end(digest)
            return self._known.get(digest)

    def verdict(self, constraint: Constraint) -> str:
        """Why it cannot be compiled; "" when it can. Blocks: call it in one of `threads`.

        Raises TrialUnavailable.
        """
        known = self.known(constraint)
        if known is not None:
            return known
        worker = self._idle_worker() or _Worker(self._first)
        answer = worker.ask(msgspec.msgpack.encode(constraint), self._limit_s)
        if answer is None:
            late = worker.late
            worker.end()
            if late:  # perhaps it was the machine: the next one may try again
                return f"takes longer than {self._limit_s:g} s to compile"
            answer = CRASHED
        else:
            with self._lock:
                self._idle.append(worker)
        with self._lock:
            self._known[_digest(constraint)] = answer
            while len(self._known) > REMEMBERED:
                self._known.popitem(last=False)
        return answer

    def _idle_worker(self) -> "_Worker | None":
        while True:
            with self._lock:
                worker = self._idle.pop() if self._idle else None
            if worker is None or worker.alive:
                return worker
            worker.end()  # somebody has ended it: no fault of the grammar that comes next


def _digest(constraint: Constraint) -> bytes:
    return hashlib.blake2b(f"{constraint.kind}\n{constraint.text}".encode()).digest()


class _Worker:
    """One compiling process, ended with this object."""

    def __init__(self, first: bytes) -> None:
        self.late = False
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "expertmesh.actors.constraint.worker"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
            )
        except OSError as error:
            raise TrialUnavailable(f"no process to compile grammars in: {error}") from None
        self._finalizer = weakref.finalize(self, _end, self._process)
        if self.ask(first, START_S) is None:
            self.end()
            raise TrialUnavailable("the process that compiles grammars does not start")

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def ask(self, frame: bytes, limit_s: float) -> str | None:
        """None when it has died or, `late`, not answered in time."""
        pipes, end = self._process, time.monotonic() + limit_s
        assert pipes.stdin is not None and pipes.stdout is not None
        try:
            write_frame(pipes.stdin, frame)  # type: ignore[arg-type]
        except OSError:
            return None
        poll = select.poll()  # select() fails on the descriptors of a busy server
        poll.register(pipes.stdout, select.POLLIN)
        self.late = not poll.poll(max(0.0, end - time.monotonic()) * 1000)
        if self.late:
            return None
        answer = read_frame(pipes.stdout)  # type: ignore[arg-type]
        return None if answer is None else answer.decode()

    def end(self) -> None:
        self._finalizer()


def _end(process: "subprocess.Popen[bytes]") -> None:
    process.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            try:
                pipe.close()
            except OSError:  # what was still to be written has no reader
                continue
