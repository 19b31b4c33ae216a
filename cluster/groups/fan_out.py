"""What a placement costs a trace: actors per token, and how unevenly they are loaded."""

import numpy as np

from expertmesh.cluster.groups.types import Ints


def fan_out(experts_TK: Ints, owner_E: Ints) -> float:
    """Mean number of distinct owners (actors, groups) of a token's choices; NaN without tokens."""
    owners = np.sort(owner_E[experts_TK], axis=1)
    return float(1.0 + (owners[:, 1:] != owners[:, :-1]).sum(axis=1).mean())


def imbalance(experts_TK: Ints, owner_E: Ints, owners: int) -> float:
    """Largest number of choices of an owner over the mean; 1 without tokens."""
    load = np.bincount(owner_E[experts_TK].ravel(), minlength=owners)
    return float(load.max() / load.mean()) if load.any() else 1.0
