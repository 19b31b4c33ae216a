"""How an expert's load is shared by its copies: towards equal loads of the actors, cheaply.

The exact answer is a linear program per layer. Here all copies of all layers take steps at once
towards the level of the actors that hold the same expert; the result is always a valid split, so
the largest load is an upper bound of what the per-step choice of copies can reach.

Letters: L layers, P actors, S slots, E experts; C copies that are not alone; G experts they are
copies of; N changes. Flat: F slots of the table [L, P, S], A actors [L, P], K experts [L, E].
Loads are in units of the mean load of an actor.
"""

from typing import cast

import numpy as np
from numpy.typing import NDArray

from expertmesh.cluster.balancing.islands import island_risks
from expertmesh.cluster.balancing.table import FREE, Floats, Ids, Ints

Bools = NDArray[np.bool_]

STEP = 1.6
"""Over-relaxation. Each actor takes the mean of what its copies ask for, so below 2 is stable."""
TINY = 1e-30


class Shares:
    """Who holds what, and how loads are shared: the state of a repair.

    ids_LPS: the table. load_LE: load of each expert. slack: load that every copy keeps, if its
    even share is as much, so that some can flow away when a step differs from the forecast.
    home_LE: actor where the expert had rather stay; unset: anywhere.
    share_F: of its expert's load in each flat slot. load_A: of each flat actor, the sum of these.
    """

    def __init__(
        self, ids_LPS: Ids, load_LE: Floats, slack: float, home_LE: Ints | None = None
    ) -> None:
        """Splits evenly. `index` comes next."""
        layers, actors, slots = ids_LPS.shape
        experts = load_LE.shape[1]
        self.ids_LPS, self.load_LE, self.slack = ids_LPS, load_LE, slack
        self._home_LE = home_LE
        self.key_LPS = _keys(ids_LPS, experts)
        key_F = self.key_LPS.reshape(-1)
        held_F = ids_LPS.reshape(-1) != FREE
        full = bool(held_F.all())
        self.count_K = np.bincount(key_F if full else key_F[held_F], minlength=layers * experts)
        share_K = load_LE.reshape(-1) / self.count_K
        several_K = self.count_K > 1
        if full:
            self.share_F, self._shared_F = share_K.take(key_F), several_K.take(key_F)
        else:
            self.share_F = share_K[key_F * held_F] * held_F
            self._shared_F = several_K[key_F * held_F] & held_F
        self.load_A = self.share_F.reshape(-1, slots).sum(1)
        # Without about one spare copy per actor, sharing nothing is nobody's fault.
        self._risky_L = (self.count_K.reshape(layers, experts) - 1).sum(1) >= actors
        self._risk_A = np.zeros(layers * actors)

    def keep(self, at_O: Ints) -> None:
        """Forgets all layers but these. `index` comes next."""
        layers, actors, _ = self.ids_LPS.shape
        self.ids_LPS, self.load_LE = self.ids_LPS[at_O], self.load_LE[at_O]
        if self._home_LE is not None:
            self._home_LE = self._home_LE[at_O]
        self.key_LPS = _keys(self.ids_LPS, self.load_LE.shape[1])
        self.count_K = self.count_K.reshape(layers, -1)[at_O].reshape(-1)
        self.share_F = self.share_F.reshape(layers, -1)[at_O].reshape(-1)
        self._shared_F = self._shared_F.reshape(layers, -1)[at_O].reshape(-1)
        self.load_A = self.load_A.reshape(layers, actors)[at_O].reshape(-1)
        self._risk_A = self._risk_A.reshape(layers, actors)[at_O].reshape(-1)
        self._risky_L = self._risky_L[at_O]

    def index(self) -> None:
        """Looks at what changed in the table.

        An expert's shares are made whole: what a dropped copy had goes to the others.
        """
        layers, actors, slots = self.ids_LPS.shape
        slot_C = np.flatnonzero(self._shared_F)
        key_C = self.key_LPS.reshape(-1).take(slot_C)
        several_C = self.count_K.take(key_C) > 1
        if not several_C.all():
            self._give_all(slot_C[~several_C], key_C[~several_C])
            slot_C, key_C = slot_C[several_C], key_C[several_C]
        key_G = np.flatnonzero(self.count_K > 1)
        group_K = np.empty(len(self.count_K), np.int64)
        group_K[key_G] = np.arange(len(key_G))
        self.slot_C, self.group_C, self.actor_C = slot_C, group_K.take(key_C), slot_C // slots
        self.size_G = self.count_K.take(key_G)
        self.degree_A = np.bincount(self.actor_C, minlength=layers * actors)
        self.load_G = self.load_LE.reshape(-1).take(key_G)
        floor_G = np.minimum(self.load_G / self.size_G, self.slack)
        self._floor_C = floor_G.take(self.group_C)
        self._above_G = self.load_G - self.size_G * floor_G
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
        sum_G = _sums(self.group_C, above_C, len(self.size_G))
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

    def assess(self) -> None:
        """Sees what the next window may add to the loads and nobody could take."""
        shared_A = _sums(self.actor_C, self.share_F.take(self.slot_C), len(self.load_A))
        self._risk_A = island_risks(self.group_C, self.actor_C, self.load_G, shared_A)
        self._risk_A.reshape(self.load_LP.shape)[~self._risky_L] = 0.0

    @property
    def strain_LP(self) -> Floats:
        """The load and what the next window may add, as last assessed.

        Nothing for actors that have changed since: they have probably got company.
        """
        strain_LP: Floats = (self.load_A + self._risk_A).reshape(self.ids_LPS.shape[:2])
        return strain_LP

    @property
    def homes(self) -> bool:
        """Experts rather stay somewhere."""
        return self._home_LE is not None

    def at_home(self, slot_N: Ints) -> Floats:
        """1 where the expert in the flat slot is where it had rather stay, else 0."""
        assert self._home_LE is not None
        _, actors, slots = self.ids_LPS.shape
        home_N = self._home_LE.reshape(-1)[self.key_LPS.reshape(-1)[slot_N]]
        at_home_N: Floats = (home_N == slot_N // slots % actors).astype(np.float64)
        return at_home_N

    def level(self, sweeps: int) -> None:
        """Steps towards the fairest split."""
        if not len(self.slot_C):
            return
        actors, groups = len(self.load_A), len(self.size_G)
        group_C, actor_C = self.group_C, self.actor_C
        weight_C = 1.0 / self.degree_A.take(actor_C)
        part_C = weight_C / _sums(group_C, weight_C, groups).take(group_C)
        pull_C = STEP * weight_C
        above_C = self.share_F.take(self.slot_C) - self._floor_C
        for _ in range(sweeps):
            load_C = self.load_A.take(actor_C)
            new_C = _sums(group_C, load_C * part_C, groups).take(group_C)
            new_C -= load_C
            new_C *= pull_C
            new_C += above_C
            np.maximum(new_C, 0.0, out=new_C)
            # The steps of an expert's copies sum to 0, so what is left is never less than needed.
            sum_G = _sums(group_C, new_C, groups)
            new_C *= (self._above_G / np.maximum(sum_G, TINY)).take(group_C)
            self.load_A += _sums(actor_C, new_C - above_C, actors)
            above_C = new_C
        self.share_F[self.slot_C] = above_C + self._floor_C

    def put(self, slot_N: Ints, key_N: Ints, share_N: Floats) -> None:
        """Experts (layer * E + expert) with a share each go in the flat slots, whatever was there.

        Loads and counts follow; what the others of the experts share does with the next `index`.
        """
        slots = self.ids_LPS.shape[2]
        old_N = self.key_LPS.reshape(-1)[slot_N]
        had_N = self.ids_LPS.reshape(-1)[slot_N] != FREE
        np.subtract.at(self.count_K, old_N[had_N], 1)
        np.add.at(self.count_K, key_N, 1)
        self._add(slot_N // slots, share_N - self.share_F[slot_N])
        self._risk_A[slot_N // slots] = 0.0
        self.key_LPS.reshape(-1)[slot_N] = key_N
        self.ids_LPS.reshape(-1)[slot_N] = key_N % self.load_LE.shape[1]
        self.share_F[slot_N] = share_N
        self._shared_F[slot_N] = True

    def take(self, slot_N: Ints, share_N: Floats) -> None:
        """The flat slots (one may come several times) give up so much; others have copies now."""
        actor_N = slot_N // self.ids_LPS.shape[2]
        self._add(actor_N, -share_N)
        self._risk_A[actor_N] = 0.0
        np.subtract.at(self.share_F, slot_N, share_N)
        self._shared_F[slot_N] = True

    def _add(self, actor_N: Ints, load_N: Floats) -> None:
        self.load_A += _sums(actor_N, load_N, len(self.load_A))


def _keys(ids_LPS: Ids, experts: int) -> Ints:
    """[L, P, S]: layer * E + expert; where the slot is free, something less."""
    key_LPS: Ints = ids_LPS + (np.arange(len(ids_LPS)) * experts)[:, None, None]
    return key_LPS


def _sums(at_N: Ints, what_N: Floats, count: int) -> Floats:
    """[count]: the sum of what is at each index; numpy's types say that it counts."""
    return cast(Floats, np.bincount(at_N, what_N, count))
