"""How many choices each copy serves, so that the most loaded actor has as few as possible.

A transport problem in integers: what an expert with one copy brings stays where it is; what a set
(see replica_graph) brings is divided among its holders. A forest with one cycle per tree is solved
exactly by sweeps from the leaves. Sets of two outside it are first divided by the currents of the
graph and larger ones evenly; shortest augmenting paths then make the whole optimal. All numbers
are integers: equal inputs, equal answer on any machine.
"""

import numpy as np
from numpy.typing import NDArray

from expertmesh.actors.exchange.replica_graph import PULL, Edge, ReplicaGraph


def split(graph: ReplicaGraph, counts: NDArray[np.int64]) -> tuple[list[int], list[int]]:
    """Choices served by copy [C], and the load of each actor [P]; the largest load is minimal.

    counts: choices by code [P + G]: those that only one actor can serve, then those of each set.
    """
    fixed, totals = counts[: graph.actors], counts[graph.actors :].tolist()
    load, served = fixed.tolist(), [0] * len(graph.actor)
    if graph.chords or graph.wide:
        _divide(graph, fixed, totals, load, served)
    goal = -(-int(counts.sum()) // graph.actors)
    brought = [total for total, members in zip(totals, graph.holders, strict=True) for _ in members]
    free = not (graph.chords or graph.wide)
    while (short := _sweep(graph, load, brought, goal, served)) and free:
        goal += short
    for edges in (graph.leaves, *graph.rings):
        for edge in edges:
            load[edge.near] += served[edge.near_copy]
            load[edge.far] += served[edge.far_copy]
    if short:
        augment(graph, load, served, goal)
    return served, load


def _divide(
    graph: ReplicaGraph,
    fixed: NDArray[np.int64],
    totals: list[int],
    load: list[int],
    served: list[int],
) -> None:
    """Serves the sets outside the forest: wide ones evenly, chords by the currents of the graph."""
    even = [
        divmod(total, len(members)) for total, members in zip(totals, graph.holders, strict=True)
    ]
    shares = np.array([share for share, _ in even])[graph.set_C]
    load_P = fixed + np.bincount(graph.actor, shares, graph.actors).astype(np.int64)
    for index, flow in zip(graph.chords, (graph.pull_HP @ load_P // PULL).tolist(), strict=True):
        copy, total = graph.first[index], totals[index]
        served[copy] = near = min(max(even[index][0] - flow, 0), total)
        served[copy + 1] = total - near
    for index in graph.wide:
        share, rest = even[index]
        for nth in range(len(graph.holders[index])):
            served[graph.first[index] + nth] = share + (nth < rest)
    for actor, choices in zip(graph.actor, served, strict=True):
        load[actor] += choices


def _sweep(
    graph: ReplicaGraph, load: list[int], brought: list[int], goal: int, served: list[int]
) -> int:
    """Serves the forest's sets with no actor above `goal`, or by how much to raise it at least.

    From the leaves inwards each actor serves all it can, which leaves the least to the others.
    What reaches an actor falls with the goal as a convex function whose slope we carry: an actor
    that gets too much raises the goal as far as this line says (Newton's method from below, so
    the first goal that needs no raise is the least one).
    """
    load, slope, short = list(load), [0] * graph.actors, 0
    for edge in graph.leaves:
        near, far, copy = edge.near, edge.far, edge.near_copy
        room, total = goal - load[near], brought[copy]
        if room >= total:
            served[copy], served[edge.far_copy] = total, 0
            continue
        steep = slope[near] + 1
        if room < 0:
            short, room = max(short, -(room // steep)), 0
        served[copy] = room
        served[edge.far_copy] = rest = total - room
        load[far] += rest
        slope[far] += steep
    for actor in graph.roots:
        if load[actor] > goal:
            short = max(short, -((goal - load[actor]) // (slope[actor] + 1)))
    for ring in graph.rings:
        short = max(short, _sweep_ring(ring, load, slope, brought, goal, served))
    return short


def _sweep_ring(
    ring: list[Edge],
    load: list[int],
    slope: list[int],
    brought: list[int],
    goal: int,
    served: list[int],
) -> int:
    """Goes round with what each actor leaves to the next until the first gets what it assumed.

    Two rounds do unless all of the ring is above the goal: where an actor leaves nothing, the
    rest of the way no longer depends on the start.
    """
    rest, steep, short = 0, 0, 0
    for _ in range(3):
        assumed = rest
        for edge in ring:
            near, copy = edge.near, edge.near_copy
            room, total = goal - load[near] - rest, brought[copy]
            if room >= total:
                served[copy], served[edge.far_copy] = total, 0
                rest = steep = 0
                continue
            steep += slope[near] + 1
            if room < 0:
                short, room = max(short, -(room // steep)), 0
            served[copy] = room
            served[edge.far_copy] = rest = total - room
        if rest == assumed:
            return short
    actors = sum(slope[edge.near] + 1 for edge in ring)
    return max(short, -((assumed - rest) // actors))


def augment(graph: ReplicaGraph, load: list[int], served: list[int], goal: int) -> int:
    """Shifts load along shortest paths until the largest load is minimal; returns that load.

    goal: a lower bound on it. What an overloaded actor reaches has no other holders, so the mean
    load of those actors is a lower bound as well: it becomes the goal when no path is left.
    """
    for actor in range(graph.actors):
        while load[actor] > goal:
            path, reached = _path(graph, load, served, actor, goal)
            if not path:
                goal = -(-sum(load[other] for other in reached) // len(reached))
                continue
            end = graph.actor[path[0][1]]
            shift = min(load[actor] - goal, goal - load[end], *(served[c] for c, _ in path))
            for giver, taker in path:
                served[giver] -= shift
                served[taker] += shift
            load[actor] -= shift
            load[end] += shift
    return goal


def _path(
    graph: ReplicaGraph, load: list[int], served: list[int], start: int, goal: int
) -> tuple[list[tuple[int, int]], list[int]]:
    """Shortest way from `start` to an actor below the goal: (giving, taking copy), last first.

    Also the actors reached. No way: an empty path.
    """
    came: dict[int, tuple[int, int]] = {start: (-1, -1)}
    queue = [start]
    for actor in queue:  # grows while it is walked
        for giver in graph.copies[actor]:
            if not served[giver]:
                continue
            for taker in graph.peers[giver]:
                other = graph.actor[taker]
                if other in came:
                    continue
                came[other] = giver, taker
                if load[other] < goal:
                    path = []
                    while other != start:
                        step = came[other]
                        path.append(step)
                        other = graph.actor[step[0]]
                    return path, queue
                queue.append(other)
    return [], queue
