"""A mesh's control plane that only claims to be: of any size, with loads made up to be uneven."""

from typing import Any

import msgspec
import numpy as np

from expertmesh.cluster.ledger.overview import Overview, layer_overviews
from expertmesh.cluster.ledger.stats import ActorLoad, MeshStats, ReplicaLoad, RoutingStats
from expertmesh.cluster.placement import contiguous_placement


class FakeControl:
    """`step` is the only thing that moves: counters grow with it. Attributes may be set.

    silent: raises this instead of answering.
    """

    def __init__(
        self, layers: int = 6, experts: int = 32, actors: int = 4, replicas: int = 2
    ) -> None:
        self.layers, self.experts = tuple(range(1, layers + 1)), experts
        self.actors, self.replicas = actors, replicas
        self.step, self.epoch, self.state, self.reason = 0, 3, "ready", ""
        self.silent: Exception | None = None
        self.down: set[str] = set()
        self.asked = 0

    def _answering(self) -> None:
        if self.silent is not None:
            raise self.silent

    @property
    def hits_LE(self) -> np.ndarray:
        draw = np.random.default_rng(7)
        weights_LE = draw.gamma(2.0, size=(len(self.layers), self.experts))
        hits_LE: np.ndarray = weights_LE * (100.0 * self.step)
        return hits_LE

    async def status(self) -> dict[str, Any]:
        self._answering()

        def member(seat: str, number: int) -> dict[str, Any]:
            return {"seat": seat, "actor": f"m-{seat}.{self.epoch}", "pid": 4000 + number,
                    "host": "node-a", "address": "10.0.0.1", "leaving": False}  # fmt: skip

        return {
            "state": self.state, "reason": self.reason, "epoch": self.epoch, "routing_version": 8,
            "slots_per_actor": 8, "desired": {"attention": self.replicas, "experts": self.actors},
            "attention": [member(f"attention-{i}", i) for i in range(self.replicas)],
            "experts": [
                member(f"expert-{i}", 100 + i) | {"experts_per_layer": 8}
                for i in range(self.actors)
            ],
            "losses": self.epoch - 3, "last_loss": "m-expert-0.3 (pid 4100 on node-a): killed",
            "failovers": self.epoch - 3, "last_recovery_seconds": 0.31, "reloaded_experts": 0,
            "joins": 0, "failed_joins": 0, "last_error": "", "rebalances": 1,
            "failed_rebalances": 0, "moved_experts": 12, "seconds_since_rebalance": 5.0,
            "last_rebalance_error": "",
        }  # fmt: skip

    async def stats(self) -> bytes:
        self._answering()
        self.asked += 1
        seats = [f"expert-{i}" for i in range(self.actors)]
        return msgspec.msgpack.encode(
            MeshStats(
                state=self.state,
                epoch=self.epoch,
                routing_version=8,
                failovers=self.epoch - 3,
                losses=self.epoch - 3,
                last_recovery=0.31,
                members={"attention": self.replicas, "expert": self.actors},
                desired={"attention": self.replicas, "expert": self.actors},
                rebalances={"done": 1, "failed": 0},
                moved_experts=12,
                actors=[
                    ActorLoad(seat, 900 * self.step * (i + 1), 0.2 * self.step, seat not in
                              self.down, 5 << 20, 1 << 20)
                    for i, seat in enumerate(seats)
                ],
                replicas=[
                    ReplicaLoad(f"attention-{i}", 1000 * self.step, 800 * self.step)
                    for i in range(self.replicas)
                ],
                routing=RoutingStats(0.7, 0.85, 0.93),
            )
        )  # fmt: skip

    async def routing_overview(self) -> bytes:
        self._answering()
        placement = contiguous_placement(self.layers, self.experts, self.actors)
        none_LE = np.zeros((len(self.layers), self.experts), bool)
        return msgspec.msgpack.encode(
            Overview(
                windows=self.step,
                experts=self.experts,
                top_k=4,
                seats=[f"expert-{i}" for i in range(self.actors)],
                fan_out=1.25 if self.step else None,
                layers=layer_overviews(self.layers, self.hits_LE, placement, none_LE),
            )
        )

    async def scale(self, experts: Any, attention: Any, dry_run: bool) -> dict[str, Any]:
        raise NotImplementedError

    async def rebalance(self, dry_run: bool) -> dict[str, Any]:
        raise NotImplementedError

    async def routing_report(self) -> dict[str, Any]:
        raise NotImplementedError

    async def record_routing(self, seconds: float, tokens: int) -> bytes:
        raise NotImplementedError
