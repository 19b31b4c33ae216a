"""What a change of placement is made of."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from expertmesh.cluster.placement import Placement


class BalanceError(ValueError):
    """No plan can come from this input. The message names what is wrong and what would do."""


class Move(NamedTuple):
    """The expert's weights are copied from actor `source`, which held them before, to `target`."""

    layer: int
    expert: int
    source: int
    target: int


class Drop(NamedTuple):
    """The actor stops holding the expert."""

    layer: int
    expert: int
    actor: int


@dataclass(frozen=True, eq=False)
class Plan:
    """A new placement beside the one it came from.

    before_L, after_L: max/mean over actors of the load of each layer, the copies of an expert
    sharing its load as the planner assumed; layers in the order of `old.held`. 1.0 is perfect.
    """

    old: Placement
    placement: Placement
    before_L: NDArray[np.float64]
    after_L: NDArray[np.float64]

    @cached_property
    def moves(self) -> tuple[Move, ...]:
        """Copies to make, by layer, target, expert. Sources take turns where there are several."""
        return tuple(_moves(self.old, self.placement))

    @cached_property
    def drops(self) -> tuple[Drop, ...]:
        """Copies to forget, by layer, actor, expert."""
        return tuple(_drops(self.old, self.placement))

    def replicas_LE(self, experts: int) -> NDArray[np.int64]:
        """Copies of each expert, layers in the order of the placement."""
        return np.stack(
            [
                np.bincount([e for ids in held for e in ids], minlength=experts)
                for held in self.placement.held.values()
            ]
        )

    @property
    def before(self) -> float:
        return float(self.before_L.mean())

    @property
    def after(self) -> float:
        return float(self.after_L.mean())


def padded(held: tuple[tuple[int, ...], ...], actors: int) -> tuple[tuple[int, ...], ...]:
    """The layer with empty actors appended: those that join."""
    return held + ((),) * (actors - len(held))


def holders(held: tuple[tuple[int, ...], ...]) -> dict[int, list[int]]:
    """expert -> actors that hold it, ascending."""
    found: dict[int, list[int]] = {}
    for actor, experts in enumerate(held):
        for expert in experts:
            found.setdefault(expert, []).append(actor)
    return found


def _moves(old: Placement, new: Placement) -> Iterator[Move]:
    for layer, held in new.held.items():
        before = padded(old.held[layer], len(held))
        if before == held:
            continue
        sources = holders(before)
        turn = dict.fromkeys(sources, 0)
        for target, experts in enumerate(held):
            for expert in sorted(set(experts) - set(before[target])):
                actors = sources[expert]
                yield Move(layer, expert, actors[turn[expert] % len(actors)], target)
                turn[expert] += 1


def _drops(old: Placement, new: Placement) -> Iterator[Drop]:
    for layer, held in new.held.items():
        for actor, experts in enumerate(old.held[layer]):
            for expert in sorted(set(experts) - set(held[actor])):
                yield Drop(layer, expert, actor)
