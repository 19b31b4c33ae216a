"""Why a command ended, in numbers that scripts can test. 2 is the shell's "wrong usage"."""

from enum import IntEnum


class ExitCode(IntEnum):
    OK = 0
    FAILED = 1
    USAGE = 2
    NO_MODEL = 3
    BAD_CHECKPOINT = 4
    PORT = 5
    MEMORY = 6
    LAUNCH = 7
    UNREACHABLE = 8
    DIFFERS = 9
    DAMAGED_LEDGER = 10


class Refused(Exception):
    """A start, or a wish, that can not work. hint: what the user can do about it."""

    def __init__(self, code: ExitCode, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.code, self.message, self.hint = code, message, hint
