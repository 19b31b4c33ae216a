"""Where each expert's latent group lives, so that changes can rather leave it there."""

from collections.abc import Iterable

import numpy as np

from expertmesh.cluster.balancing.table import FREE, Ints
from expertmesh.cluster.groups.types import Groups


def homes(groups: Groups, layers: Iterable[int], ids_LPS: Ints) -> Ints:
    """[L, E]: the actor that holds most of the expert's group.

    The first of several that hold as many.
    """
    group_LE = np.stack([groups.of[layer] for layer in layers])
    rows, actors, _ = ids_LPS.shape
    group_LPS = np.take_along_axis(group_LE[:, None, :], np.maximum(ids_LPS, 0), axis=2)
    cell_LPS = (group_LPS + np.arange(rows)[:, None, None] * groups.count) * actors
    cell_LPS += np.arange(actors)[None, :, None]
    members = np.bincount(cell_LPS[ids_LPS != FREE], minlength=rows * groups.count * actors)
    home_LG = members.reshape(rows, groups.count, actors).argmax(2)
    return np.take_along_axis(home_LG, group_LE, axis=1)
