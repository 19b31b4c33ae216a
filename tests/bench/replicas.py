"""Per step: how evenly actors are loaded, by placement of the spare slots and division of copies.

One decode step per layer on the published synthetic load (896 experts, top-16, popularity
lognormal sigma 0.45). `even` divides each expert evenly among its copies, `ours` is the split in
whole choices that attention ranks use, `optimum` the fractional optimum of a linear program.
`heat` places copies as EPLB does (next copy to the most load per copy, heaviest copies to the
lightest actor), `connected` as cluster/spares.py does on a placement of single copies. Loads are
those of a window of so many tokens; window 0 knows the popularity.
`rows`: what a whole choice costs in small and large steps, and the actors that a token visits.
"""

import argparse
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from expertmesh.actors.exchange.replica_split import split
from expertmesh.actors.exchange.replicas import ReplicaChoice
from expertmesh.cluster.spares import place_spares
from tests.bench import machine
from tests.support.least_load import by_linear_program
from tests.support.routing_loads import (
    choose,
    expected_counts,
    fan_out,
    lognormal,
    one_copy_each,
    zipf,
)

EXPERTS, TOP_K = 896, 16
TARGET = "connected, 64 spare slots: ours <= 1.005 at 32 actors, <= 1.02 at 64; split_us <= 200"

Holds = NDArray[np.bool_]
Loads = NDArray[np.float64]


def main(arguments: list[str]) -> dict[str, Any]:
    parser = argparse.ArgumentParser(prog="replicas", description=__doc__)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--actors", nargs="+", type=int, default=[32, 64])
    parser.add_argument("--slots", nargs="+", type=int, default=[64, 128], help="spare, of a layer")
    parser.add_argument("--windows", nargs="+", type=int, default=[16384, 0])
    parser.add_argument("--tokens", type=int, default=2048, help="of the step")
    parser.add_argument("--sigma", type=float, default=0.45)
    parser.add_argument("--zipf", type=float, help="power of a Zipf popularity instead")
    parser.add_argument("--repeats", type=int, default=15)
    options = parser.parse_args(arguments)
    return {
        "bench": "replicas",
        "machine": machine.facts(),
        "target": TARGET,
        "balance": _balance(options),
        "rows": _rows(options.repeats),
        "options": vars(options),
    }


def _balance(options: argparse.Namespace) -> list[dict[str, Any]]:
    found: dict[tuple[Any, ...], list[dict[str, float]]] = {}
    for layer in range(options.layers):
        rng = np.random.default_rng(layer)
        popularity_E = (
            zipf(rng, EXPERTS, options.zipf)
            if options.zipf
            else lognormal(rng, EXPERTS, options.sigma)
        )
        step_TK = choose(rng, popularity_E, options.tokens, TOP_K)
        for window in options.windows:
            load_E = expected_counts(popularity_E, options.tokens, TOP_K)
            if window:
                seen = choose(rng, popularity_E, window, TOP_K)
                load_E = np.bincount(seen.reshape(-1), minlength=EXPERTS).astype(np.float64)
            for actors in options.actors:
                for slots in options.slots:
                    for name, place in (("heat", _by_heat), ("connected", _connected)):
                        holds_PE = place(load_E, actors, slots)
                        key = (window, actors, slots, name)
                        found.setdefault(key, []).append(_step(holds_PE, step_TK, options.repeats))
    return [
        dict(zip(("window", "actors", "spare_slots", "placement"), key, strict=True))
        | {name: _summary([one[name] for one in layers]) for name in layers[0]}
        for key, layers in found.items()
    ]


def _step(holds_PE: Holds, ids_TK: NDArray[np.int64], repeats: int) -> dict[str, float]:
    counts_E = np.bincount(ids_TK.reshape(-1), minlength=holds_PE.shape[1])
    choice, mean = ReplicaChoice(holds_PE), ids_TK.size / len(holds_PE)
    counts = np.bincount(
        choice.graph.code_E, counts_E, len(holds_PE) + len(choice.graph.holders)
    ).astype(np.int64)
    return {
        "split_us": _microseconds(lambda: split(choice.graph, counts), repeats),
        "assign_us": _microseconds(lambda: choice.assign(ids_TK), repeats),
        "even": float((holds_PE @ (counts_E / holds_PE.sum(0))).max() / mean),
        "ours": float(choice.split(counts_E)[1].max() / mean),
        "optimum": by_linear_program(holds_PE, counts_E) / mean,
        "fan_out_even": fan_out(_evenly(holds_PE, ids_TK)),
        "fan_out_ours": fan_out(choice.assign(ids_TK)),
    }


def _rows(repeats: int) -> list[dict[str, Any]]:
    rng = np.random.default_rng(0)
    hot_E, alike_E = lognormal(rng, EXPERTS, 0.45), lognormal(rng, 32, 0.45)
    cases = [(_twice(rng, actors, 32), alike_E, 8) for actors in (2, 3, 4)]
    cases.append((_connected(expected_counts(hot_E, 2048, TOP_K), 64, 64), hot_E, TOP_K))
    found = []
    for holds_PE, popularity_E, top_k in cases:
        choice, experts = ReplicaChoice(holds_PE), holds_PE.shape[1]
        single = ReplicaChoice(one_copy_each(popularity_E, len(holds_PE)))
        for rows in (1, 8, 32, 512, 2048):
            steps = [choose(rng, popularity_E, rows, top_k) for _ in range(5)]
            ours = [choice.assign(ids_TK) for ids_TK in steps]
            even = [_evenly(holds_PE, ids_TK) for ids_TK in steps]
            found.append({
                "actors": len(holds_PE), "experts": experts, "top_k": top_k, "rows": rows,
                "assign_us": _microseconds(lambda s=steps, c=choice: c.assign(s[0]), repeats),
                "assign_us_no_copies": _microseconds(
                    lambda s=steps, c=single: c.assign(s[0]), repeats),
                "fan_out_even": float(np.mean([fan_out(one) for one in even])),
                "fan_out_ours": float(np.mean([fan_out(one) for one in ours])),
                "max_over_mean_even": _imbalance(even, len(holds_PE)),
                "max_over_mean_ours": _imbalance(ours, len(holds_PE)),
            })  # fmt: skip
    return found


def _by_heat(load_E: Loads, actors: int, spares: int) -> Holds:
    """As EPLB places, but never two copies of an expert on one actor."""
    count_E = np.ones(len(load_E), np.int64)
    for _ in range(spares):
        count_E[(load_E / count_E).argmax()] += 1
    share_E, slots = load_E / count_E, (len(load_E) + spares) // actors
    holds_PE, load_P = np.zeros((actors, len(load_E)), bool), np.zeros(actors)
    copies = np.repeat(np.arange(len(load_E)), count_E)
    for expert in copies[np.argsort(-share_E[copies], kind="stable")]:
        can_P = (holds_PE.sum(1) < slots) & ~holds_PE[:, expert]
        actor = int(np.where(can_P, load_P, np.inf).argmin())
        holds_PE[actor, expert] = True
        load_P[actor] += share_E[expert]
    return holds_PE


def _connected(load_E: Loads, actors: int, spares: int) -> Holds:
    # An expert hotter than an actor will get copies: only one share of it weighs on its first.
    shares_E = np.maximum(np.ceil(load_E * actors / load_E.sum()), 1)
    holds_PE = one_copy_each(load_E / shares_E, actors)
    free_P = np.full(actors, spares // actors)
    for actor, expert in place_spares(holds_PE, load_E, free_P):
        holds_PE[actor, expert] = True
    return holds_PE


def _twice(rng: np.random.Generator, actors: int, experts: int) -> Holds:
    holds_PE = np.zeros((actors, experts), bool)
    for expert in range(experts):
        holds_PE[rng.permutation(actors)[:2], expert] = True
    return holds_PE


def _evenly(holds_PE: Holds, ids_TK: NDArray[np.int64]) -> NDArray[np.int64]:
    """The nth choice of an expert goes to its holder n modulo their number."""
    flat, chosen = ids_TK.reshape(-1), np.empty(ids_TK.size, np.int64)
    for expert in np.unique(flat):
        holders = np.flatnonzero(holds_PE[:, expert])
        at = np.flatnonzero(flat == expert)
        chosen[at] = holders[np.arange(len(at)) % len(holders)]
    return chosen.reshape(ids_TK.shape)


def _imbalance(assigned: list[NDArray[np.integer]], actors: int) -> float:
    """Mean over steps of max/mean."""
    loads = [np.bincount(one.reshape(-1), minlength=actors) for one in assigned]
    return float(np.mean([load_P.max() / load_P.mean() for load_P in loads]))


def _microseconds(function: Callable[[], object], repeats: int) -> float:
    times = []
    for _ in range(repeats):
        began = time.perf_counter()
        function()
        times.append(time.perf_counter() - began)
    return round(float(np.median(times)) * 1e6, 1)


def _summary(values: list[float]) -> dict[str, float]:
    return {"mean": round(float(np.mean(values)), 4), "max": round(max(values), 4)}
