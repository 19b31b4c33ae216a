"""What a GPU day does, in which order, within which time: sections of named items."""

import time
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Section:
    """Items that are independent of each other, in the order of their importance.

    seconds: of the whole section. patience: of one item, after which its process is ended.
    workers: processes that share the items; 1 where they measure time.
    """

    name: str
    items: list[str]
    seconds: float
    patience: float
    workers: int = 1


@dataclass(slots=True)
class Outcome:
    """What became of a section: each of its items is in exactly one of the three."""

    results: dict[str, Any] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)
    skipped: list[str] = field(default_factory=list)
    seconds: float = 0.0


class Clock:
    """The time left to a run, and to one section of it."""

    def __init__(self, seconds: float) -> None:
        self.begin = time.monotonic()
        self.end = self.begin + seconds

    def elapsed(self) -> float:
        return time.monotonic() - self.begin

    def section_end(self, section: Section) -> float:
        return min(self.end, time.monotonic() + section.seconds)
