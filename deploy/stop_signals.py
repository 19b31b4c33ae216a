"""SIGINT and SIGTERM as an exception, raised once."""

import signal
from types import FrameType


class Stopped(BaseException):
    """SIGINT or SIGTERM arrived. Not an Exception, so that nothing on the way swallows it."""


def _raise_stopped(signum: int, frame: FrameType | None) -> None:
    # Once: a second signal must not tear the stop itself apart.
    handle_signals(signal.SIG_IGN)
    raise Stopped


def handle_signals(handler: "signal._HANDLER") -> None:
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, handler)


def stop_by_signal() -> None:
    """From now on SIGINT and SIGTERM raise Stopped, the first time."""
    handle_signals(_raise_stopped)
