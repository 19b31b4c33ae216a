"""Actors that a token's experts lie on, and how evenly these are loaded: neighbours by number,
random sets and latent groups, on tokens that the groups were not made from.

`alone`: each expert once. `even` starts from the same sets and swaps experts until the loads of the
first half are within 2 %, whatever belongs together. `with_spares`: every actor has the slots that
let one actor be lost; the balancer fills them, and copies are chosen per step as in service.
"""

import argparse
import time
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from expertmesh.actors.exchange.replicas import ReplicaChoice
from expertmesh.actors.model.loading import LoadSettings
from expertmesh.cluster.balancing.planner import balance
from expertmesh.cluster.groups import graph
from expertmesh.cluster.groups.fan_out import fan_out, imbalance
from expertmesh.cluster.groups.partition import GroupSettings, groups_from_routers, partition
from expertmesh.cluster.groups.place import place_groups
from expertmesh.cluster.groups.refine import even_loads
from expertmesh.cluster.groups.routers import router_weights
from expertmesh.cluster.groups.types import Groups, Ints, contiguous
from tests.bench import machine, models, routed_text
from tests.support.coactivated import Traffic, gini, hits

TARGET = "groups: fan_out at least 20 % below contiguous, imbalance <= 1.05"
STEP_TOKENS, STEPS = 2048, 16


def main(arguments: list[str]) -> dict[str, Any]:
    parser = argparse.ArgumentParser(prog="groups", description=__doc__)
    parser.add_argument("--actors", nargs="+", type=int, default=[8, 32, 64])
    parser.add_argument("--tokens", type=int, default=262_144, help="in each half")
    parser.add_argument(
        "--topic",
        nargs="+",
        type=float,
        default=[2.0, 3.0, 4.0],
        help="how much likelier a token's topic makes its experts, log units",
    )
    parser.add_argument("--layers", type=int, default=92, help="grouped for the clock; 0: none")
    parser.add_argument("--nano-actors", nargs="+", type=int, default=[2, 4, 8])
    parser.add_argument("--nano-tokens", type=int, default=60_000, help="both halves; 0: none")
    parser.add_argument("--text", type=Path, nargs="*", help="read by nano; else Python's help")
    options = parser.parse_args(arguments)  # fmt: skip
    facts = machine.facts()
    synthetic = [_synthetic(Traffic(sigma=0.5, topic=t), options) for t in options.topic]
    clock = _seconds(options.layers, max(options.actors)) if options.layers else None
    nano = _nano(options) if options.nano_tokens else None
    options.text = None if options.text is None else [str(path) for path in options.text]
    return {"bench": "groups", "machine": facts, "target": TARGET, "options": vars(options),
            "synthetic": synthetic, "whole_model": clock, "nano": nano}  # fmt: skip


def _synthetic(traffic: Traffic, options: argparse.Namespace) -> dict[str, Any]:
    tokens = traffic.tokens(2 * options.tokens)
    seen, later = tokens[: options.tokens], tokens[options.tokens :]
    hits_E = hits(seen, traffic.experts)
    together = graph.together(seen, traffic.experts)
    return {
        "traffic": vars(traffic),
        "gini": round(gini(hits_E), 3),
        # Of all pairs of choices: 0 when choices do not depend on one another.
        "pairs_beyond_chance": round(graph.beyond_chance(together).sum() / together.sum(), 3),
        "actors": {a: _compare(seen, later, traffic.experts, a) for a in options.actors},
    }


def _compare(seen: NDArray, later: NDArray, experts: int, actors: int) -> dict[str, Any]:
    """The three ways to place the experts of one layer; measured on `later`."""
    load_E = hits(seen, experts).astype(np.float64)
    near = contiguous(experts, actors)
    mixed = np.random.default_rng(0).permutation(near)
    grouped = _groups(seen, experts, actors)
    alone = {
        "contiguous": near,
        "contiguous_even": _even(near, load_E, actors),
        "random_even": _even(mixed, load_E, actors),
        "groups": grouped,
    }
    rows = {name: _alone(owner, later, actors) for name, owner in alone.items()}
    base = rows["contiguous"]["fan_out"]
    spare = {
        name: _with_spares(owner, load_E, later, actors)
        for name, owner in (("contiguous", near), ("groups", grouped))
    }
    return {
        "alone": rows,
        "fan_out_lower_percent": round(100 * (1 - rows["groups"]["fan_out"] / base), 1),
        "with_spares": spare,
        "fan_out_lower_percent_with_spares": round(
            100 * (1 - spare["groups"]["fan_out"] / spare["contiguous"]["fan_out"]), 1
        ),
    }


def _groups(seen: NDArray, experts: int, count: int) -> Ints:
    load_E = hits(seen, experts).astype(np.float64)
    weight_EE = graph.beyond_chance(graph.together(seen, experts))
    return partition(weight_EE, load_E, count, GroupSettings())


def _even(owner_E: Ints, load_E: NDArray, actors: int) -> Ints:
    nothing = np.zeros((len(load_E), len(load_E)))
    return even_loads(owner_E, nothing, load_E, actors, GroupSettings().max_imbalance)


def _alone(owner_E: Ints, later: NDArray, actors: int) -> dict[str, float]:
    return {
        "fan_out": round(fan_out(later, owner_E), 3),
        "imbalance": round(imbalance(later, owner_E, actors), 4),
    }


def _with_spares(owner_E: Ints, load_E: NDArray, later: NDArray, actors: int) -> dict[str, Any]:
    experts = len(owner_E)
    slots = -(-experts // (actors - 1))
    placed = place_groups(Groups({0: owner_E}, actors), None, actors, slots)
    held = balance(load_E[None], placed, slots=slots).placement.held[0]
    holds_PE = np.zeros((actors, experts), bool)
    for actor, ids in enumerate(held):
        holds_PE[actor, list(ids)] = True
    choice = ReplicaChoice(holds_PE)
    total_P, reached, worst = np.zeros(actors), [], []
    for begin in range(0, min(len(later), STEPS * STEP_TOKENS), STEP_TOKENS):
        actor_TK = np.sort(choice.assign(later[begin : begin + STEP_TOKENS].astype(np.int64)), 1)
        reached.append(1 + (np.diff(actor_TK, axis=1) > 0).sum(1).mean())
        load_P = np.bincount(actor_TK.ravel(), minlength=actors)
        worst.append(load_P.max() / load_P.mean())
        total_P += load_P
    return {
        "slots": slots,
        "fan_out": round(float(np.mean(reached)), 3),
        "step_imbalance": round(float(np.mean(worst)), 4),
        "imbalance": round(float(total_P.max() / total_P.mean()), 4),
    }


def _seconds(layers: int, actors: int) -> dict[str, Any]:
    """All layers of K3's shape, from counting pairs to groups, on one core."""
    tokens = Traffic(sigma=0.5).tokens(16_384)
    rng, spent, cpu = np.random.default_rng(0), [], time.process_time()
    for _ in range(layers):
        renamed = rng.permutation(Traffic.experts)[tokens]
        began = time.perf_counter()
        _groups(renamed, Traffic.experts, actors)
        spent.append(time.perf_counter() - began)
    return {
        "layers": layers,
        "actors": actors,
        "tokens": len(tokens),
        "seconds": round(sum(spent), 2),
        "cpu_seconds": round(time.process_time() - cpu, 2),
        "seconds_per_layer_median": round(float(np.median(spent)), 3),
    }


def _nano(options: argparse.Namespace) -> dict[str, Any]:
    """Halves of the text in turn, piece by piece, so that both have all its subjects."""
    text = routed_text.default_text()
    if options.text:
        text = "\n".join(path.read_text() for path in options.text)
    folder = models.checkpoint("nano")
    layers, experts, trace = routed_text.routing(folder, text, options.nano_tokens)
    half = np.arange(len(trace)) // routed_text.PIECE % 2
    seen, later = trace[half == 0], trace[half == 1]
    routers = router_weights(LoadSettings(model=folder).open())
    per_actors: dict[int, Any] = {}
    for actors in options.nano_actors:
        prior = groups_from_routers(routers, actors).of
        rows = [_compare(seen[:, i], later[:, i], experts, actors) for i in range(len(layers))]
        per_actors[actors] = {
            name: {
                "fan_out": round(float(np.mean([r["alone"][name]["fan_out"] for r in rows])), 3),
                "imbalance": round(max(r["alone"][name]["imbalance"] for r in rows), 4),
            }
            for name in rows[0]["alone"]
        }
        # Without any traffic, and so with loads as they come.
        reached = [fan_out(later[:, i], prior[layer]) for i, layer in enumerate(layers)]
        per_actors[actors]["router_prior"] = {"fan_out": round(float(np.mean(reached)), 3)}
    ginis = [gini(hits(trace[:, i], experts)) for i in range(len(layers))]
    pairs = [graph.together(trace[:, i], experts) for i in range(len(layers))]
    return {
        "tokens": len(trace),
        "layers": len(layers),
        "experts": experts,
        "gini": [round(g, 3) for g in ginis],
        "pairs_beyond_chance": [round(graph.beyond_chance(p).sum() / p.sum(), 3) for p in pairs],
        "actors, mean fan-out and worst imbalance over the layers": per_actors,
    }
