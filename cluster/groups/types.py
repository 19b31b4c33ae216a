"""Latent groups as data: which group each expert of each layer belongs to."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from expertmesh.cluster.placement import check_actors

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True, eq=False)
class Groups:
    """of[layer]: int64 [E], the group of each expert, 0 to count - 1.

    A group is placed as a unit where it fits; every layer has the same number of groups.
    """

    of: Mapping[int, Ints]
    count: int

    def members(self, layer: int) -> tuple[tuple[int, ...], ...]:
        """The experts of each group of a layer, ascending."""
        group_E = self.of[layer]
        return tuple(
            tuple(int(e) for e in np.flatnonzero(group_E == group)) for group in range(self.count)
        )


def contiguous_groups(layers: tuple[int, ...], experts: int, count: int) -> Groups:
    """Groups before any traffic: neighbours, sizes differ by at most one, the larger ones first.

    Raises PlacementError when a group would stay empty.
    """
    group_E = contiguous(experts, count)
    return Groups(dict.fromkeys(layers, group_E), count)


def contiguous(experts: int, count: int) -> Ints:
    """int64 [E]; read-only, as layers share it."""
    check_actors(experts, count)
    group_E = np.repeat(np.arange(count), group_sizes(experts, count))
    group_E.flags.writeable = False
    return group_E


def group_sizes(experts: int, count: int) -> Ints:
    """int64 [count]: sizes that differ by at most one."""
    small, larger = divmod(experts, count)
    return np.full(count, small) + (np.arange(count) < larger)
