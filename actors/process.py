"""What every actor process says of itself and sets up before it computes."""

import contextlib
import gc
import os
import socket
from typing import NamedTuple

import msgspec
import torch


class Whereabouts(msgspec.Struct, frozen=True):
    """pid and host name for error messages, address for the process groups."""

    pid: int
    hostname: str
    address: str
    threads: int


class LoadState(msgspec.Struct, frozen=True):
    """Bytes of weights read so far and in all."""

    done: int = 0
    total: int = 0


class Health(NamedTuple):
    """What an attention replica says of itself to a front door.

    serving: a request sent now would be served. lost: the requests it had are gone; while it is
    false they live on, even when `serving` is.
    """

    serving: bool
    reason: str = ""
    lost: bool = False


class Pulse(NamedTuple):
    """What any actor answers to the control plane.

    epoch: the one it serves, -1 before the first. broken: why that epoch has ended without another
    one to follow. stuck: why this process cannot go on, whatever the epoch.
    """

    epoch: int = -1
    broken: str = ""
    stuck: str = ""


def own_cores() -> int:
    """Cores this process may run on."""
    return len(os.sched_getaffinity(0))


def settle(address: str, threads: int) -> Whereabouts:
    """Limits this process to its share of the cores.

    Several processes that each use all cores starve one another: two times two threads on two
    cores run 35 times slower than two times one.
    """
    torch.set_num_threads(threads)
    return Whereabouts(os.getpid(), socket.gethostname(), address, threads)


def keep_heap() -> None:
    """Takes all objects there are as being there for good: to be called when all is loaded.

    Python's full collections walk through every object while nothing else runs: what imports and
    weights leave behind takes them 0.1 s, again and again, since pages and requests are objects,
    too. They leave out what is frozen.
    """
    gc.collect()
    gc.freeze()


def yield_to_sender() -> None:
    """From here on this thread does not preempt whoever wakes it.

    Linux likes to run a woken thread at once, on the processor of the thread that woke it. An
    expert would so take the attention thread's core in the middle of its send, which then reaches
    the other experts only when the first is done. Elsewhere, or where refused, nothing changes.
    """
    if hasattr(os, "SCHED_BATCH"):
        with contextlib.suppress(OSError):
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
