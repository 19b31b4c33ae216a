"""A file system of which any call can be made to fail, to lie or to hang."""

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field

from expertmesh.actors.state.disk.files import Buffer, Files

STALL_S = 30.0  # of a call that hangs, unless it is let go


@dataclass
class FaultyFiles(Files):
    """write_errno, read_errno: raised while they are not 0. flip: of every read, a bit is wrong;
    flips: of the next so many. short: every read ends early. hang: cleared for calls to hang.
    open_fds, reads, written: descriptors, sizes, and bytes in all."""

    write_errno: int = 0
    read_errno: int = 0
    flip: bool = False
    flips: int = 0
    short: bool = False
    hang: threading.Event = field(default_factory=threading.Event)
    open_fds: set[int] = field(default_factory=set)
    written: int = 0
    reads: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.hang.set()

    def create(self, path):  # type: ignore[no-untyped-def]
        fd = super().create(path)
        self.open_fds.add(fd)
        return fd

    def close(self, fd: int) -> None:
        self.open_fds.discard(fd)
        super().close(fd)

    def write(self, fd: int, buffers: Sequence[Buffer], offset: int) -> None:
        self.hang.wait(STALL_S)
        if self.write_errno:
            raise OSError(self.write_errno, "injected")
        super().write(fd, buffers, offset)
        self.written += sum(map(len, buffers))

    def read(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        self.hang.wait(STALL_S)
        if self.read_errno:
            raise OSError(self.read_errno, "injected")
        count = super().read(fd, buffers, offset)
        self.reads.append(count)
        if self.flip or self.flips > 0:
            self.flips -= 1
            buffers[0][count // 2] ^= 1
        return count - 1 if self.short else count
