"""The cold tier as the store sees it: the segment log, and when to leave it alone."""

from typing import NamedTuple

from expertmesh.actors.state.item import Name
from expertmesh.actors.state.stats import TierStats
from expertmesh.actors.state.tiers.breaker import Breaker, Clock
from expertmesh.actors.state.tiers.content import Stored
from expertmesh.actors.state.tiers.fetch import LoadedItem
from expertmesh.actors.state.tiers.negative import NegativeCache


class DiskRead(NamedTuple):
    """item: exact, as the disk has it. kept: what of it stays in host memory."""

    item: LoadedItem
    kept: Stored
    seconds: float


class ColdTier:
    """What is known of the disk's health."""

    def __init__(self, clock: Clock) -> None:
        self.stats = TierStats()
        self.reads = Breaker(clock)
        self.negative = NegativeCache(clock)

    def has(self, name: Name) -> bool:
        return False

    def read(self, name: Name) -> DiskRead | str:
        return "missing"

    def judge(self, reason: str) -> None:
        """What a fetch that asked the disk says of its health."""
        if reason in ("timeout", "io", "error"):
            self.reads.failed()
        elif reason != "cancelled":
            self.reads.succeeded()
