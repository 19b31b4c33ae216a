"""How an expert's load is shared by its copies: towards equal loads of the actors, cheaply.

The exact answer is a linear program per layer. Here all copies of all layers take steps at once
towards the level of the actors that hold the same expert; the result is always a valid split, so
the largest load is an upper bound of what the per-step choice of copies can reach.
"""

from dataclasses import dataclass

import numpy as np

from expertmesh.cluster.balancing.table import FREE, Floats, Ints

STEP = 1.6
"""Over-relaxation. Each actor takes the mean of what its copies ask for, so below 2 is stable."""


@dataclass(slots=True)
class Shares:
    """The state of a repair: who holds what, and how loads are shared now.

    ids_LPS: the table. load_LE: per expert, in units of the mean load of an actor. share_LPS: of
    the expert's load in that slot; load_LP its sums. count_LE: copies.
    slot_C, group_C: index in the flat table of each copy that is not alone, and which expert's it
    is (0 to G - 1). reserve: the part of an even share that every copy keeps, so that there is
    room both ways when a step's tokens differ from the forecast.
    """

    ids_LPS: Ints
    load_LE: Floats
    share_LPS: Floats
    reserve: float
    count_LE: Ints
    slot_C: Ints
    group_C: Ints
    actor_C: Ints
    share_C: Floats
    floor_C: Floats
    above_G: Floats
    size_G: Ints
    load_P: Floats

    @classmethod
    def of(cls, ids_LPS: Ints, load_LE: Floats, share_LPS: Floats, reserve: float) -> "Shares":
        """Takes over share_LPS where an expert has several copies; nothing there = evenly."""
        layers, actors, slots = ids_LPS.shape
        experts = load_LE.shape[1]
        key = (ids_LPS + (np.arange(layers) * experts)[:, None, None]).reshape(-1)
        held = ids_LPS.reshape(-1) != FREE
        key = np.where(held, key, 0)
        count = np.bincount(key[held], minlength=layers * experts)
        several = (count[key] > 1) & held
        share = np.where(several, share_LPS.reshape(-1), load_LE.reshape(-1)[key] * held)
        slot_C = np.flatnonzero(several)
        key_C = key[slot_C]
        present = count > 1
        group_C = (np.cumsum(present) - 1)[key_C]
        load_G, size_G = load_LE.reshape(-1)[present], count[present]
        shares = cls(
            ids_LPS,
            load_LE,
            share.reshape(ids_LPS.shape),
            reserve,
            count.reshape(load_LE.shape),
            slot_C,
            group_C,
            slot_C // slots,
            share[slot_C],
            (reserve * load_G / size_G)[group_C],
            load_G * (1 - reserve),
            size_G,
            np.zeros(layers * actors),
        )
        shares.share_C = shares._whole(shares.share_C)
        shares.share_LPS.reshape(-1)[slot_C] = shares.share_C
        shares.load_P = shares.share_LPS.sum(2).reshape(-1)
        return shares

    @property
    def load_LP(self) -> Floats:
        return self.load_P.reshape(self.ids_LPS.shape[:2])

    @property
    def degree_LP(self) -> Ints:
        """Copies with a sibling elsewhere, through which an actor can give load away or take it."""
        return np.bincount(self.actor_C, minlength=len(self.load_P)).reshape(self.ids_LPS.shape[:2])

    def level(self, sweeps: int) -> None:
        """Steps towards the fairest split; changes share_LPS and load_P."""
        if not len(self.slot_C):
            return
        actors, groups = len(self.load_P), len(self.size_G)
        weight_C = 1.0 / np.bincount(self.actor_C, minlength=actors)[self.actor_C]
        weight_G = np.bincount(self.group_C, weight_C, groups)
        for _ in range(sweeps):
            load_C = self.load_P[self.actor_C]
            level_G = np.bincount(self.group_C, load_C * weight_C, groups) / weight_G
            step_C = STEP * weight_C * (level_G[self.group_C] - load_C)
            share_C = self._whole(self.share_C + step_C)
            self.load_P += np.bincount(self.actor_C, share_C - self.share_C, actors)
            self.share_C = share_C
        self.share_LPS.reshape(-1)[self.slot_C] = self.share_C

    def _whole(self, share_C: Floats) -> Floats:
        """The shares clipped at their floors, then scaled to sum to their expert's load."""
        groups = len(self.size_G)
        above_C = np.maximum(share_C - self.floor_C, 0.0)
        sum_G = np.bincount(self.group_C, above_C, groups)
        none_G = sum_G <= 0.0
        if none_G.any():
            above_C = np.where(none_G[self.group_C], 1.0, above_C)
            sum_G = np.where(none_G, self.size_G, sum_G)
        return self.floor_C + above_C * (self.above_G / sum_G)[self.group_C]
