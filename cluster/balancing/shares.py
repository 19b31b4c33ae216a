"""How an expert's load is shared by its copies: towards equal loads of the actors, cheaply.

The exact answer is a linear program per layer. Here all copies of all layers take steps at once
towards the level of the actors that hold the same expert; the result is always a valid split, so
the largest load is an upper bound of what the per-step choice of copies can reach.

Letters: L layers, P actors, S slots, E experts; C copies that are not alone, of the open layers;
G experts they are copies of; N changes. Flat: F slots of the table [L, P, S], A actors [L, P],
K experts [L, E]. Loads are in units of the mean load of an actor.
"""

import numpy as np
from numpy.typing import NDArray

from expertmesh.cluster.balancing.table import FREE, Floats, Ints

Bools = NDArray[np.bool_]

STEP = 1.6
"""Over-relaxation. Each actor takes the mean of what its copies ask for, so below 2 is stable."""
ALONE = 0.03
"""Added to the load of an actor that shares no expert: all noise of its own stays with it."""
TINY = 1e-30


class Shares:
    """Who holds what, and how loads are shared: the state of a repair.

    ids_LPS: the table. load_LE: load of each expert. slack: load that every copy keeps, if its
    even share is as much, so that some can flow away when a step differs from the forecast.
    home_LE: actor where the expert had rather stay; unset: anywhere.
    share_F: of its expert's load in each flat slot. load_A: of each flat actor, the sum of these.
    """

    def __init__(
        self, ids_LPS: Ints, load_LE: Floats, slack: float, home_LE: Ints | None = None
    ) -> None:
        """Splits evenly. `open` comes next."""
        layers, actors, slots = ids_LPS.shape
        experts = load_LE.shape[1]
        self.ids_LPS, self.load_LE, self.slack = ids_LPS, load_LE, slack
        self._home_LE = home_LE
        self.key_LPS = ids_LPS + (np.arange(layers) * experts)[:, None, None]
        key_F = self.key_LPS.reshape(-1)
        held_F = ids_LPS.reshape(-1) != FREE
        full = bool(held_F.all())
        self.count_K = np.bincount(key_F if full else key_F[held_F], minlength=layers * experts)
        share_K = load_LE.reshape(-1) / np.maximum(self.count_K, 1)
        self.share_F = share_K[key_F] if full else share_K[key_F * held_F] * held_F
        self.load_A = self.share_F.reshape(-1, slots).sum(1)
        self._shared_F = (self.count_K > 1)[key_F * held_F] & held_F
        # Without about one spare copy per actor, sharing nothing is nobody's fault.
        spare_L = (self.count_K.reshape(layers, experts) - 1).sum(1)
        self.open_L = np.ones(layers, bool)
        self._alone_L1 = (ALONE * (spare_L >= actors))[:, None]

    def open(self, open_L: Bools) -> None:
        """Looks at these layers from now on, and at what changed in the table since.

        An expert's shares are made whole: what a dropped copy had goes to the others.
        """
        layers, actors, slots = self.ids_LPS.shape
        self.open_L = open_L
        slot_C = np.flatnonzero(self._shared_F)
        if not open_L.all():
            slot_C = slot_C[open_L.take(slot_C // (actors * slots))]
        key_C = self.key_LPS.reshape(-1).take(slot_C)
        several_C = self.count_K.take(key_C) > 1
        if not several_C.all():
            self._give_all(slot_C[~several_C], key_C[~several_C])
            slot_C, key_C = slot_C[several_C], key_C[several_C]
        present_K = np.zeros(len(self.count_K), bool)
        present_K[key_C] = True
        key_G = np.flatnonzero(present_K)
        group_K = np.empty(len(self.count_K), np.int64)
        group_K[key_G] = np.arange(len(key_G))
        self.slot_C, self.group_C, self.actor_C = slot_C, group_K.take(key_C), slot_C // slots
        self.size_G = self.count_K.take(key_G)
        self.degree_A = np.bincount(self.actor_C, minlength=layers * actors)
        load_G = self.load_LE.reshape(-1).take(key_G)
        floor_G = np.minimum(load_G / self.size_G, self.slack)
        self._floor_C, self._above_G = floor_G.take(self.group_C), load_G - self.size_G * floor_G
        self._make_whole()

    def _give_all(self, slot_N: Ints, key_N: Ints) -> None:
        """These copies have become the only ones of their experts."""
        load_N = self.load_LE.reshape(-1)[key_N]
        self._add(slot_N // self.ids_LPS.shape[2], load_N - self.share_F[slot_N])
        self.share_F[slot_N] = load_N
        self._shared_F[slot_N] = False

    def _make_whole(self) -> None:
        """The shares above the floors, scaled so that an expert's sum to its load."""
        share_C = self.share_F.take(self.slot_C)
        above_C = np.maximum(share_C - self._floor_C, 0.0)
        sum_G = np.bincount(self.group_C, above_C, len(self.size_G))
        starved_G = (sum_G <= 0.0) & (self._above_G > 0.0)
        if starved_G.any():  # the copies that had something are gone: the others start evenly
            above_C[starved_G[self.group_C]] = 1.0
            sum_G[starved_G] = self.size_G[starved_G]
        above_C *= (self._above_G / np.maximum(sum_G, TINY)).take(self.group_C)
        whole_C = above_C + self._floor_C
        self._add(self.actor_C, whole_C - share_C)
        self.share_F[self.slot_C] = whole_C

    @property
    def load_LP(self) -> Floats:
        load_LP: Floats = self.load_A.reshape(self.ids_LPS.shape[:2])
        return load_LP

    @property
    def strain_LP(self) -> Floats:
        """Of open layers: the load, with a surcharge for actors that keep less than the slack in
        what they share: up to ALONE for those that share nothing."""
        kept_A = np.bincount(self.actor_C, self._floor_C, len(self.load_A))
        lacking_A = np.maximum(1.0 - kept_A / max(self.slack, TINY), 0.0)
        strain_LP: Floats = self.load_LP + self._alone_L1 * lacking_A.reshape(self.load_LP.shape)
        return strain_LP

    def at_home(self, slot_N: Ints) -> Floats:
        """1 where the expert in the flat slot is where it had rather stay, else 0."""
        if self._home_LE is None:
            return np.zeros(slot_N.shape)
        _, actors, slots = self.ids_LPS.shape
        home_N = self._home_LE.reshape(-1)[self.key_LPS.reshape(-1)[slot_N]]
        at_home_N: Floats = (home_N == slot_N // slots % actors).astype(np.float64)
        return at_home_N

    def level(self, sweeps: int) -> None:
        """Steps towards the fairest split of the open layers."""
        if not len(self.slot_C):
            return
        actors, groups = len(self.load_A), len(self.size_G)
        group_C, actor_C = self.group_C, self.actor_C
        weight_C = 1.0 / self.degree_A.take(actor_C)
        part_C = weight_C / np.bincount(group_C, weight_C, groups).take(group_C)
        pull_C = STEP * weight_C
        above_C = self.share_F.take(self.slot_C) - self._floor_C
        for _ in range(sweeps):
            load_C = self.load_A.take(actor_C)
            new_C = np.bincount(group_C, load_C * part_C, groups).take(group_C)
            new_C -= load_C
            new_C *= pull_C
            new_C += above_C
            np.maximum(new_C, 0.0, out=new_C)
            # The steps of an expert's copies sum to 0, so what is left is never less than needed.
            sum_G = np.bincount(group_C, new_C, groups)
            new_C *= (self._above_G / np.maximum(sum_G, TINY)).take(group_C)
            self.load_A += np.bincount(actor_C, new_C - above_C, actors)
            above_C = new_C
        self.share_F[self.slot_C] = above_C + self._floor_C

    def put(self, slot_N: Ints, key_N: Ints, share_N: Floats) -> None:
        """Experts (layer * E + expert) with a share each go in the flat slots, whatever was there.

        Loads and counts follow; what the others of the experts share does with the next `open`.
        """
        slots = self.ids_LPS.shape[2]
        old_N = self.key_LPS.reshape(-1)[slot_N]
        had_N = self.ids_LPS.reshape(-1)[slot_N] != FREE
        np.subtract.at(self.count_K, old_N[had_N], 1)
        np.add.at(self.count_K, key_N, 1)
        self._add(slot_N // slots, share_N - self.share_F[slot_N])
        self.key_LPS.reshape(-1)[slot_N] = key_N
        self.ids_LPS.reshape(-1)[slot_N] = key_N % self.load_LE.shape[1]
        self.share_F[slot_N] = share_N
        self._shared_F[slot_N] = True

    def take(self, slot_N: Ints, share_N: Floats) -> None:
        """The flat slots (one may come several times) give up so much; others have copies now."""
        self._add(slot_N // self.ids_LPS.shape[2], -share_N)
        np.subtract.at(self.share_F, slot_N, share_N)
        self._shared_F[slot_N] = True

    def _add(self, actor_N: Ints, load_N: Floats) -> None:
        self.load_A += np.bincount(actor_N, load_N, len(self.load_A))
