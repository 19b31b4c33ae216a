"""What a plan costs and what it is worth: ours beside DeepSeek's load balancer, on the same loads.

Every planner starts from its own placement for an earlier window of the same popularity, plans for
the window just seen and is judged on the next one, which it has not seen. Loads: see
tests/support/load_windows.py; K3's shape unless told otherwise. Imbalance is max/mean over actors
of a window's load, with the load of an expert split evenly over its copies, or as the per-step
choice of copies may split it at best (a linear program; every actor serves what it can).
"""

import argparse
import os
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from expertmesh.cluster.balancing.planner import balance
from expertmesh.cluster.balancing.table import to_table
from expertmesh.cluster.placement import Placement, contiguous_placement
from tests.bench import machine
from tests.support import load_windows
from tests.support.eplb import packing_of_all_layers, rebalance_experts
from tests.support.least_load import by_linear_program

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Planner = Callable[[Floats, Any], Any]

LOADS = ("lognormal 0.45", "lognormal 0.9", "zipf 0.5", "zipf 1.0")
CHANGES = {"same": 0.0, "drift": 0.1, "new": 1.0}
STEP_TOKENS = 2_048


def main(arguments: Sequence[str]) -> dict[str, Any]:
    parser = argparse.ArgumentParser(prog="tests.bench planner", description=__doc__)
    parser.add_argument("--layers", type=int, default=92)
    parser.add_argument("--experts", type=int, default=896)
    parser.add_argument("--copies", type=int, default=960, help="slots of a layer, all actors")
    parser.add_argument("--actors", type=int, nargs="+", default=[64, 32])
    parser.add_argument("--loads", nargs="+", default=LOADS)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--loops", action="store_true", help="also time EPLB's packing in loops")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    return {
        "machine": machine.facts(),
        "shape": {name: getattr(options, name) for name in ("layers", "experts", "copies")},
        "cases": [
            case
            for actors in options.actors
            for kind in options.loads
            for case in _cases(options, actors, kind)
        ],
    }


def _cases(options: argparse.Namespace, actors: int, kind: str) -> list[dict[str, Any]]:
    rng = np.random.default_rng(options.seed)
    slots = options.copies // actors
    eplb = partial(rebalance_experts, replicas=options.copies, groups=1, nodes=1, gpus=actors)
    planners: dict[str, Planner] = {
        "expertmesh": lambda loads, old: balance(loads, old, slots=slots).placement,
        "eplb_all_layers": lambda loads, old: eplb(loads, packing=packing_of_all_layers),
    }
    if options.loops:
        planners["eplb_loops"] = lambda loads, old: eplb(loads)
    old_popularity = load_windows.popularity(rng, kind, options.layers, options.experts)
    layers = tuple(range(options.layers))
    start: dict[str, Any] = dict.fromkeys(planners)
    start["expertmesh"] = contiguous_placement(layers, options.experts, actors)
    for _ in range(2):  # the first fills free slots, the second is a plan like any other
        loads = load_windows.window(rng, old_popularity)
        start = {name: plan(loads, start[name]) for name, plan in planners.items()}
    cases = []
    for change, part in CHANGES.items():
        popularity = load_windows.drifted(rng, kind, old_popularity, part)
        seen, following = (load_windows.window(rng, popularity) for _ in range(2))
        step = load_windows.window(rng, popularity, STEP_TOKENS)
        plans, times = _timed(planners, seen, start, options.repeats)
        judged = {
            name: times[name]
            | _judged(_table(start[name], actors), _table(plans[name], actors), following, step)
            for name in planners
        }
        case = {"actors": actors, "load": kind, "gini": round(load_windows.gini(seen), 3)}
        cases.append(case | {"change": change, "planners": judged})
    return cases


def _timed(
    planners: dict[str, Planner], loads: Floats, start: dict[str, Any], repeats: int
) -> tuple[dict[str, Any], dict[str, dict[str, Any]]]:
    """One plan each in turn, `repeats` times. CPU time bears other load, wall time does not."""
    plans: dict[str, Any] = {}
    wall: dict[str, list[float]] = {name: [] for name in planners}
    cpu: dict[str, list[float]] = {name: [] for name in planners}
    loaded = os.getloadavg()[0]
    for repeat in range(repeats):
        for name in list(planners)[:: 1 if repeat % 2 else -1]:
            began, began_cpu = time.perf_counter(), time.thread_time()
            plans[name] = planners[name](loads, start[name])
            wall[name].append((time.perf_counter() - began) * 1e3)
            cpu[name].append((time.thread_time() - began_cpu) * 1e3)
    times = {
        name: {
            "plan_ms": {
                "median": round(statistics.median(wall[name]), 2),
                "min": round(min(wall[name]), 2),
                "max": round(max(wall[name]), 2),
            },
            "plan_cpu_ms_min": round(min(cpu[name]), 2),
            "load_average": round(loaded, 2),
        }
        for name in planners
    }
    return plans, times


def _judged(old_LPS: Ints, new_LPS: Ints, following: Floats, step: Floats) -> dict[str, Any]:
    return {
        "next_window_before": _imbalance(old_LPS, following),
        "next_window": _imbalance(new_LPS, following),
        f"step_of_{STEP_TOKENS}_tokens": _imbalance(new_LPS, step),
        "moved_percent": round(100 * _moved(old_LPS, new_LPS, following.shape[1]), 2),
    }


def _table(placement: Placement | Ints, actors: int) -> Ints:
    """[L, P, S]"""
    if isinstance(placement, Placement):
        slots = max(len(ids) for rows in placement.held.values() for ids in rows)
        return to_table(placement.held.values(), actors, slots)
    return placement.reshape(len(placement), actors, -1)


def _imbalance(table_LPS: Ints, loads_LE: Floats) -> dict[str, dict[str, float]]:
    even, best = [], []
    for ids_PS, load_E in zip(table_LPS, loads_LE, strict=True):
        held = ids_PS >= 0
        count_E = np.bincount(ids_PS[held], minlength=len(load_E))
        load_P = ((load_E / count_E)[ids_PS] * held).sum(1)
        even.append(load_P.max() / load_P.mean())
        holds_PE = np.zeros((len(ids_PS), len(load_E)), bool)
        holds_PE[np.nonzero(held)[0], ids_PS[held]] = True
        best.append(by_linear_program(holds_PE, load_E) / load_P.mean())
    return {
        name: {"mean": round(float(np.mean(values)), 4), "worst_layer": round(max(values), 4)}
        for name, values in (("even_split", even), ("best_split", best))
    }


def _moved(old_LPS: Ints, new_LPS: Ints, experts: int) -> float:
    """Part of the new copies that their actors did not hold."""
    layers, actors, _ = new_LPS.shape

    def copies(table_LPS: Ints) -> Ints:
        owner = np.arange(layers * actors).reshape(layers, actors, 1)
        key = (owner * experts + table_LPS)[table_LPS >= 0]
        return np.bincount(key, minlength=layers * actors * experts)

    new = copies(new_LPS)
    return float(np.maximum(new - copies(old_LPS), 0).sum() / new.sum())
