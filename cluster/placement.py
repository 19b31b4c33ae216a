"""Where experts live: pure functions from counts to a placement."""

from dataclasses import dataclass


class PlacementError(ValueError):
    """The experts cannot be placed on so many actors. The message names the numbers that work."""


@dataclass(frozen=True, slots=True)
class Placement:
    """held[layer][actor]: the experts of that layer on that actor, in slot order."""

    held: dict[int, tuple[tuple[int, ...], ...]]

    @property
    def actors(self) -> int:
        return len(next(iter(self.held.values()), ()))

    def of_actor(self, actor: int) -> dict[int, tuple[int, ...]]:
        """layer -> experts of one actor."""
        return {layer: actors[actor] for layer, actors in self.held.items()}


def check_actors(experts: int, actors: int) -> None:
    """Raises PlacementError unless every actor would hold at least one expert of each layer."""
    if not 1 <= actors <= experts:
        raise PlacementError(
            f"{actors} expert actors cannot share {experts} experts per layer: "
            f"valid numbers are 1 to {experts} (0 keeps the experts with the attention half)"
        )


def contiguous_placement(layers: tuple[int, ...], experts: int, actors: int) -> Placement:
    """Latent groups before any traffic: neighbours live together, sizes differ by at most one.

    Counts need not divide: the first `experts % actors` actors hold one expert more.
    """
    check_actors(experts, actors)
    small, larger = divmod(experts, actors)
    groups, begin = [], 0
    for actor in range(actors):
        end = begin + small + (actor < larger)
        groups.append(tuple(range(begin, end)))
        begin = end
    return Placement(dict.fromkeys(layers, tuple(groups)))
