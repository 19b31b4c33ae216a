"""What the disk tier raises. Damage is never an exception: it is a miss (kv-state 3.8)."""

import errno
from collections.abc import Iterator
from contextlib import contextmanager


class DiskFailed(OSError):
    """The device or the file system refused. reason: a counter's label ("io", "closed", "full")."""

    reason = "io"

    def __init__(self, message: str, reason: str = "") -> None:
        super().__init__(message)
        if reason:
            self.reason = reason


class DiskFull(DiskFailed):
    """No room, under the cap or on the file system, and nothing that may be evicted for it."""

    reason = "full"


@contextmanager
def named(what: str) -> Iterator[None]:
    """Turns OSError into DiskFailed or DiskFull that says what was being done."""
    try:
        yield
    except DiskFailed:
        raise
    except OSError as error:
        raise failed(what, error) from error


def failed(what: str, error: OSError) -> DiskFailed:
    full = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
    return (DiskFull if full else DiskFailed)(f"{what}: {error}")
