"""What every actor process says of itself and sets up before it computes."""

import os
import socket

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


def settle(address: str, threads: int) -> Whereabouts:
    """Limits this process to its share of the cores.

    Several processes that each use all cores starve one another: two times two threads on two
    cores run 35 times slower than two times one.
    """
    torch.set_num_threads(threads)
    return Whereabouts(os.getpid(), socket.gethostname(), address, threads)
