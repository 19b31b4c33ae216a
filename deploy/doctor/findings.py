"""One line of the doctor's report."""

from typing import Literal

import msgspec

Status = Literal["ok", "warn", "fail"]


class Finding(msgspec.Struct, frozen=True):
    """section: heading of the table it belongs to. advice: what to do; empty where all is well."""

    section: str
    name: str
    status: Status
    value: str
    advice: str = ""


def judged(
    section: str, name: str, value: str, good: bool, advice: str, bad: Status = "warn"
) -> Finding:
    """ok when `good`, else `bad` with the advice."""
    return Finding(section, name, "ok" if good else bad, value, "" if good else advice)
