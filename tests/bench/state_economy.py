"""What snapshots are worth: `python -m tests.bench state_economy`.

Agents' traffic (tests/support/state_traces) against policies that say where snapshots of recurrent
state are taken and which of them go: LRU, TinyLFU, a Marconi-like one, the engine's own, and a
bound that knows the future. Rates are shares of what a snapshot at every page gives that is never
evicted, bytes are shares of what that needs (kv-state 5, G6). The same traffic, lengths divided,
also runs through an engine over a real small model; its rate is compared with the simulated one.
"""

import random
from argparse import ArgumentParser
from collections.abc import Callable, Sequence
from typing import Any

import torch

from expertmesh.actors.attention.messages import GenerateRequest, SamplingParams
from expertmesh.actors.model.batch import PAGE_TOKENS
from expertmesh.actors.state.cache import StateCache
from tests.support.state_model import VOCAB, cached, small_model
from tests.support.state_policies import (
    Dense,
    Marconi,
    Ours,
    Policy,
    Request,
    TinyLfu,
    best_offline,
)
from tests.support.state_traces import Shape, Turn, agent_turns, page_chain

POLICIES: dict[str, Callable[[int], Policy]] = {
    "lru": Policy, "tiny_lfu": TinyLfu, "marconi_like": Marconi, "ours": Ours,
}  # fmt: skip
BUDGETS = (16, 32, 64, 128, 256, 512, 1024)


def requests_of(turns: Sequence[Turn]) -> list[Request]:
    """What a policy needs to know of each turn."""
    names: dict[tuple[int, object], int] = {}
    seen: set[int] = set()
    made = []
    for turn in turns:
        chain = page_chain(turn, names)
        known = next((at for at, name in enumerate(chain) if name not in seen), len(chain))
        seen.update(chain)
        usable = (turn.length - 1) // PAGE_TOKENS
        made.append(Request(chain, usable, known, turn.length))
    return made


def hit_tokens(policy: Policy, requests: Sequence[Request]) -> int:
    return sum(policy.serve(request) for request in requests) * PAGE_TOKENS


def simulate(shape: Shape, seed: int) -> dict[str, Any]:
    requests = requests_of(agent_turns(shape, seed))
    total = sum(request.length for request in requests)
    dense = Dense(1 << 60)
    most = hit_tokens(dense, requests)
    rows = []
    for budget in BUDGETS:
        row: dict[str, Any] = {
            "snapshots": budget,
            "share_of_dense_bytes": round(budget / dense.most, 5),
        }
        for name, make in POLICIES.items():
            row[name] = round(hit_tokens(make(budget), requests) / most, 4)
        row["offline_bound"] = round(min(1.0, best_offline(requests, budget) / most), 4)
        rows.append(row)
    enough = [row["share_of_dense_bytes"] for row in rows if row["ours"] >= 0.97]
    return {
        "agents": shape.agents,
        "at_a_time": shape.overlap,
        "requests": len(requests),
        "prompt_tokens": total,
        "dense_hit_rate": round(most / total, 4),
        "dense_snapshots": dense.most,
        "rows": rows,
        "ours_reaches_97_percent_at_share_of_bytes": min(enough, default=None),
    }


def through_the_engine(shape: Shape, snapshots: int, seed: int) -> dict[str, Any]:
    """One request after the other, as the simulator has them: its snapshots have places and nothing
    else. What pages lend to them is told beside."""
    turns = agent_turns(shape, seed)
    requests = requests_of(turns)
    pages = len({name for request in requests for name in request.chain}) + 2 * len(turns)
    ladder = 4096 // shape.scale // PAGE_TOKENS
    state = {"snapshots": snapshots, "ladder_tokens": ladder * PAGE_TOKENS}
    found, with_lent = (_serve(turns, pages, state, lend) for lend in (False, True))
    ours = Ours(snapshots, ladder)
    expected = [ours.serve(request) * PAGE_TOKENS for request in requests]
    shared = [min(r.known, r.usable) for r in requests]
    total = sum(request.length for request in requests)
    return {
        "requests": len(turns),
        "snapshots": snapshots,
        "engine_hit_rate": round(sum(found) / total, 4),
        "engine_hit_rate_with_lent_pages": round(sum(with_lent) / total, 4),
        "simulated_hit_rate": round(sum(expected) / total, 4),
        "requests_that_differ": sum(a != b for a, b in zip(found, expected, strict=True)),
        "shared_prefix_and_no_hit": sum(
            bool(known) and not hit for known, hit in zip(shared, found, strict=True)
        ),
        "of_those_with_a_live_snapshot": sum(
            bool(hit) and not got for hit, got in zip(expected, found, strict=True)
        ),
    }


def _serve(turns: Sequence[Turn], pages: int, state: dict[str, int], lend: bool) -> list[int]:
    """Tokens of each prompt that were not computed. lend: whether snapshots may lie in pages; one
    takes a page of this model."""
    engine = cached(small_model(2), pages, 1, None, dict(state), step_tokens=512)
    assert isinstance(engine.cache, StateCache)
    if not lend:
        engine.cache.device.lending = None
    texts: dict[int, list[int]] = {}
    found = []
    for number, turn in enumerate(turns):
        prompt: list[int] = []
        for piece in turn.prompt:
            if piece.name not in texts:
                rng = random.Random(piece.name)
                texts[piece.name] = rng.choices(range(VOCAB), k=piece.length)
            prompt += texts[piece.name]
        params = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)
        engine.submit(GenerateRequest(str(number), prompt, params))
        outputs = []
        while not outputs:
            outputs = engine.step()
        found.append(outputs[0].cached_tokens)
    return found


def main(arguments: list[str]) -> dict[str, Any]:
    parser = ArgumentParser(prog="python -m tests.bench state_economy")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--quick", action="store_true", help="the smaller trace alone")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    shapes = [Shape()] if options.quick else [Shape(), Shape(agents=120, overlap=40)]
    small = Shape(agents=8, overlap=4, scale=16)
    return {
        "simulated": [simulate(shape, options.seed) for shape in shapes],
        "engine": [through_the_engine(small, count, options.seed) for count in (6, 12, 24)],
    }
