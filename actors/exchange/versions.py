"""The routing versions an attention rank knows, and what a step needs of each."""

import threading
from typing import Any

from expertmesh.actors.exchange.replicas import ReplicaChoice
from expertmesh.actors.exchange.roster import Roster, Routing, holders

Choices = dict[int, ReplicaChoice]  # by layer


class RoutingVersions:
    """Versions of one epoch from the one in use up to the newest. Thread-safe.

    A step uses the oldest among the newest versions of all attention ranks. What each rank
    announces never falls, so what is older than the version of one step is never used again.
    """

    def __init__(self, roster: Roster, num_experts: int) -> None:
        """Raises ValueError for an expert that no actor holds."""
        self._layers, self._actors, self._num_experts = roster.layers, roster.experts, num_experts
        self._lock = threading.Lock()
        self._known: dict[int, tuple[Routing, Choices]] = {}
        self._newest = roster.version
        self.add(Routing(roster.version, roster.placed))

    @property
    def newest(self) -> int:
        return self._newest

    def add(self, routing: Routing) -> None:
        """Raises ValueError when it does not fit the epoch."""
        with self._lock:
            before = self._known.get(self._newest)
        choices = self._choices(routing, before)
        with self._lock:
            self._known[routing.version] = routing, choices
            self._newest = max(self._newest, routing.version)

    def use(self, version: int) -> Choices:
        """The choices of that version; forgets older ones. Raises KeyError for one not known."""
        with self._lock:
            choices = self._known[version][1]
            for older in [known for known in self._known if known < version]:
                del self._known[older]
        return choices

    def _choices(self, routing: Routing, before: tuple[Routing, Choices] | None) -> Choices:
        """A layer whose experts stay where they were keeps its object: building one costs."""
        placed: Any = routing.placed
        if tuple(sorted(placed)) != self._layers:
            raise ValueError(f"routing version {routing.version} has other layers than the epoch")
        made: Choices = {}
        for layer, held in placed.items():
            if before is not None and before[0].placed[layer] == held:
                made[layer] = before[1][layer]
                continue
            what = f"routing version {routing.version}, layer {layer}"
            if len(held) != self._actors:
                raise ValueError(f"{what}: {len(held)} actors, the epoch has {self._actors}")
            try:
                holds_PE = holders(held, self._num_experts)
            except IndexError as error:
                raise ValueError(f"{what}: {error}") from error
            try:
                made[layer] = ReplicaChoice(holds_PE)
            except ValueError as error:
                raise ValueError(f"{what}: {error}") from error
        return made
