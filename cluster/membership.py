"""An epoch: one numbered set of ranks and a placement. Every change of members makes a new one."""

from dataclasses import dataclass

from expertmesh.actors.exchange.roster import Roster
from expertmesh.cluster.placement import Placement


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
class Epoch:
    """Attention ranks come first, then the expert ranks; a rank is a position in that order."""

    number: int
    attention: tuple[Member, ...]
    experts: tuple[Member, ...]
    placement: Placement
    store: tuple[str, int]

    @property
    def members(self) -> tuple[Member, ...]:
        return self.attention + self.experts

    def roster(self) -> Roster:
        """What the members' exchange needs to know."""
        held = self.placement.held
        return Roster(self.number, len(self.attention), len(self.experts), held, self.store)
