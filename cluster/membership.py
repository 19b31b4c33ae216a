"""An epoch: one numbered set of ranks and a placement. Every change of members makes a new one."""

from dataclasses import dataclass, field
from typing import Any, Literal

from expertmesh.actors.exchange.roster import Roster, Routing
from expertmesh.cluster.placement import Placement

Kind = Literal["attention", "expert"]


@dataclass(frozen=True, slots=True)
class Member:
    """name: of the Ray actor, as errors and metrics show it. pid and hostname: where it runs."""

    name: str
    pid: int
    hostname: str
    address: str

    def __str__(self) -> str:
        return f"{self.name} (pid {self.pid} on {self.hostname})"


@dataclass(frozen=True, slots=True)
class Bundle:
    """One slot of a placement group: where a worker of a seat runs, and its successor after it."""

    group: Any
    index: int


@dataclass(eq=False, slots=True)
class Worker:
    """An actor process of the mesh. seat: "expert-3"; whoever replaces it sits there next."""

    kind: Kind
    seat: str
    member: Member
    handle: Any
    bundle: Bundle
    node: str
    held: dict[int, tuple[int, ...]] = field(default_factory=dict)  # what an expert actor loaded

    def __str__(self) -> str:
        return str(self.member)


@dataclass(frozen=True, slots=True)
class Epoch:
    """Attention ranks come first, then the expert ranks; a rank is a position in that order.

    version: of the routing, which changes within an epoch when copies of experts move.
    """

    number: int
    attention: tuple[Member, ...]
    experts: tuple[Member, ...]
    placement: Placement
    store: tuple[str, int]
    version: int = 0

    @property
    def members(self) -> tuple[Member, ...]:
        return self.attention + self.experts

    def roster(self, meet_s: float | None = None) -> Roster:
        """What the members' exchange needs to know. meet_s: how long they wait for one another."""
        counts = len(self.attention), len(self.experts)
        return Roster(self.number, *counts, self.placement.held, self.store, self.version, meet_s)

    def routing(self) -> Routing:
        return Routing(self.version, self.placement.held)
