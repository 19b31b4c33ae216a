"""The graph along which load can flow between actors: its edges are the experts with copies.

P actors, E experts. Experts of a layer with the same holders are one *set*, as balance cannot tell
them apart: G sets. A *copy* is a set on one of its holders: C copies, those of a set adjacent.
"""

from collections import defaultdict
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

PULL = 1 << 12
LEAK = 2.0**-16  # ties components that no set of two joins; far below what any current needs


@dataclass(frozen=True, slots=True)
class Edge:
    """A set with two holders: what `near` does not serve, `far` does."""

    near: int  # actors
    far: int
    near_copy: int
    far_copy: int


@dataclass(frozen=True, slots=True)
class ReplicaGraph:
    """The copies of one layer, laid out for `split`: lists where it walks them one by one."""

    code_E: NDArray[np.int32]  # the actor of an expert with one copy; P + its set otherwise
    holders: list[list[int]]  # by set, actors ascending
    first: list[int]  # by set: the number of its first copy
    actor: list[int]  # by copy
    set_C: NDArray[np.int64]
    peers: list[list[int]]  # by copy: the other copies of its set
    copies: list[list[int]]  # by actor
    # A spanning forest, one cycle allowed per tree, of the sets with two holders: from the leaves
    # inwards to `roots`, or to `rings`. Other sets of two are `chords`, larger ones `wide`.
    leaves: list[Edge]
    roots: list[int]
    rings: list[list[Edge]]
    chords: list[int]
    wide: list[int]
    pull_HP: NDArray[np.int64]  # by chord, in 1 / PULL: see `_pull`

    @property
    def actors(self) -> int:
        return len(self.copies)


def replica_graph(holds_PE: NDArray[np.bool_]) -> ReplicaGraph:
    """holds_PE: actor p has a copy of expert e. Raises ValueError for an expert without one."""
    actors = len(holds_PE)
    count_E = holds_PE.sum(0)
    if not count_E.all():
        orphans = np.flatnonzero(count_E == 0).tolist()
        raise ValueError(f"no actor holds experts {orphans[:8]} ({len(orphans)} in all)")
    code_E = holds_PE.argmax(0).astype(np.int32)
    several = np.flatnonzero(count_E > 1)
    held_GP, set_of = np.unique(holds_PE.T[several], axis=0, return_inverse=True)
    code_E[several] = actors + set_of.reshape(-1)
    holders: list[list[int]] = [np.flatnonzero(held_P).tolist() for held_P in held_GP]
    first: list[int] = []
    actor: list[int] = []
    peers: list[list[int]] = []
    copies: list[list[int]] = [[] for _ in range(actors)]
    for members in holders:
        first.append(len(actor))
        mine = range(len(actor), len(actor) + len(members))
        for copy, holder in zip(mine, members, strict=True):
            actor.append(holder)
            peers.append([other for other in mine if other != copy])
            copies[holder].append(copy)
    leaves, rings, chords = _forest(actors, holders, first)
    inner = {edge.near for edges in (leaves, *rings) for edge in edges}
    return ReplicaGraph(
        code_E=code_E,
        holders=holders,
        first=first,
        actor=actor,
        set_C=np.repeat(np.arange(len(holders)), [len(members) for members in holders]),
        peers=peers,
        copies=copies,
        leaves=leaves,
        roots=[actor for actor in range(actors) if actor not in inner],
        rings=rings,
        chords=chords,
        wide=[index for index, members in enumerate(holders) if len(members) > 2],
        pull_HP=_pull(actors, holders, chords),
    )


def _pull(actors: int, holders: list[list[int]], chords: list[int]) -> NDArray[np.int64]:
    """int64 [H, P] in 1 / PULL: what chord h takes off its first holder per choice too many on p.

    The currents of the network in which every set of two is a unit conductor (between halves:
    1/2) spread an uneven load over all ways at once. Eliminated by single operations that IEEE 754
    rounds the same everywhere: a BLAS would not give the same last bits on every machine.
    """
    if not chords:
        return np.zeros((0, actors), np.int64)
    work = np.eye(actors) * LEAK
    for members in holders:
        if len(members) == 2:
            near, far = members
            work[[near, far], [near, far]] += 0.5
            work[[near, far], [far, near]] -= 0.5
    inverse = np.eye(actors)
    for pivot in range(actors):  # the matrix is symmetric and dominant: no exchange of rows
        scale = 1.0 / work[pivot, pivot]
        work[pivot] *= scale
        inverse[pivot] *= scale
        factor = work[:, pivot].copy()
        factor[pivot] = 0.0
        work -= np.multiply.outer(factor, work[pivot])
        inverse -= np.multiply.outer(factor, inverse[pivot])
    ends = np.array([holders[index] for index in chords])
    current_HP = inverse[ends[:, 0]] - inverse[ends[:, 1]]
    pull_HP: NDArray[np.int64] = np.rint(current_HP * (PULL / 2)).astype(np.int64)
    return pull_HP


def _forest(
    actors: int, holders: list[list[int]], first: list[int]
) -> tuple[list[Edge], list[list[Edge]], list[int]]:
    """Takes every set that leaves each component with at most one cycle, in order."""
    root, cyclic = list(range(actors)), [False] * actors
    edges: dict[int, dict[int, Edge]] = defaultdict(dict)  # actor -> neighbour -> from actor
    chords = []
    for index, members in enumerate(holders):
        a, b = (_find(root, actor) for actor in (members[0], members[-1]))
        if len(members) > 2:
            continue
        if cyclic[a] and (a == b or cyclic[b]):
            chords.append(index)
            continue
        cyclic[b] = a == b or cyclic[a] or cyclic[b]
        root[a] = b
        (near, far), copy = members, first[index]
        edges[near][far] = Edge(near, far, copy, copy + 1)
        edges[far][near] = Edge(far, near, copy + 1, copy)
    leaves = []
    ends = [actor for actor in range(actors) if len(edges[actor]) == 1]
    for leaf in ends:  # grows while it is walked
        if not edges[leaf]:
            continue  # the last actor of a tree
        far, edge = edges[leaf].popitem()
        del edges[far][leaf]
        leaves.append(edge)
        if len(edges[far]) == 1:
            ends.append(far)
    return leaves, [_walk(edges, actor) for actor in range(actors) if edges[actor]], chords


def _find(root: list[int], actor: int) -> int:
    while root[actor] != actor:
        root[actor] = actor = root[root[actor]]
    return actor


def _walk(edges: dict[int, dict[int, Edge]], start: int) -> list[Edge]:
    """Takes the ring through `start` out of `edges`, in walking order."""
    ring, actor = [], start
    while edges[actor]:
        far = min(edges[actor])
        ring.append(edges[actor].pop(far))
        del edges[far][actor]
        actor = far
    return ring
