"""A keeper and its attention replicas that only claim to be: for what scales them."""

import time
from typing import Any

import msgspec
import ray

from expertmesh.actors.attention.actor import ReplicaStats
from expertmesh.actors.attention.messages import EngineStats

PAGES = 1000


class FakeKeeper:
    """Has as many replicas as it was asked for, at once. load: in units of one replica's pages."""

    def __init__(self, replicas: int) -> None:
        self.desired, self.load, self.silent = replicas, 0.0, False
        self.asked: list[int] = []

    def set(self, load: float, silent: bool = False) -> None:
        self.load, self.silent = load, silent

    def state(self) -> tuple[int, list[int]]:
        return self.desired, self.asked

    def status(self) -> dict[str, Any]:
        replicas = [{"actor": f"fake-{i}", "leaving": False} for i in range(self.desired)]
        return {"desired": {"attention": self.desired, "experts": 0}, "attention": replicas}

    def scale(self, experts: None, attention: int, dry_run: bool) -> dict[str, Any]:
        assert experts is None and not dry_run
        self.desired = attention
        self.asked.append(attention)
        return {}

    def used(self) -> float | None:
        """Share of each replica's pages; None: a replica does not answer."""
        return None if self.silent else min(1.0, self.load / self.desired)


class FakeReplica:
    def __init__(self, keeper: Any) -> None:
        self._keeper = keeper

    def stats(self) -> bytes:
        end = time.monotonic() + 60
        while (used := ray.get(self._keeper.used.remote())) is None and time.monotonic() < end:
            time.sleep(0.2)
        free = PAGES - round(PAGES * (used or 0.0))
        return msgspec.msgpack.encode(ReplicaStats(EngineStats(pages_total=PAGES, pages_free=free)))
