"""Threads for calls that may never return, such as a read from a file system that hangs."""

import queue
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

from expertmesh.actors.state.tiers.worker import Crew, Worker

T = TypeVar("T")


class IoThreads:
    """Started by the first call. They end with the process, whatever they are doing."""

    def __init__(self, name: str, count: int) -> None:
        self._calls: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]]] = queue.SimpleQueue()
        self._crew = Crew([Worker(f"{name}-{i}", self._step) for i in range(count)])
        self._started = False

    def submit(self, call: Callable[[], T]) -> "Future[T]":
        """A future that can be cancelled until the call begins. One thread at a time."""
        if not self._started:
            self._crew.start()
            self._started = True
        future: Future[T] = Future()
        self._calls.put((future, call))
        return future

    @property
    def dead(self) -> int:
        """Threads that have ended by an error; must be 0."""
        return len(self._crew.dead)

    def _step(self) -> bool:
        # A function of its own: a thread that waits for work keeps nothing of the last one alive.
        _work(*self._calls.get())
        return True


def _work(future: "Future[T]", call: Callable[[], T]) -> None:
    if not future.set_running_or_notify_cancel():
        return
    try:
        result = call()
    except BaseException as error:
        future.set_exception(error)
    else:
        future.set_result(result)
