"""What tenants can learn of each other: `python -m tests.bench state_isolation`.

Probes: names of one tenant's pages asked for by others with the same tokens; requests of one tenant
against engines that hold another's state. Latency: time to the first token of prompts that another
tenant has cached and that nobody has, in random order (Kolmogorov-Smirnov). Forged: pages and
records changed on the disk, with and without a key. Verification: its share of a restore's time
(kv-state 5, G9).
"""

import random
from argparse import ArgumentParser
from time import perf_counter
from typing import Any

import numpy as np
import torch
from scipy.stats import ks_2samp

from expertmesh.actors.attention.engine import Engine
from expertmesh.actors.attention.messages import GenerateRequest, SamplingParams
from expertmesh.actors.state.keys import chain, root_key
from tests.support.state_model import VOCAB, cached, small_model

FINGERPRINT = b"isolation"


def name_probes(count: int, pages: int = 100) -> dict[str, Any]:
    """Names of `pages` pages of one tenant, looked up by as many others as `count` takes."""
    rng = random.Random(0)
    tokens = [rng.randrange(VOCAB) for _ in range(pages * 64)]
    held = set(chain(root_key(FINGERPRINT, "owner"), tokens))
    hits = probes = tenant = 0
    while probes < count:
        names = chain(root_key(FINGERPRINT, f"tenant {tenant}"), tokens)
        hits += sum(name in held for name in names)
        probes, tenant = probes + len(names), tenant + 1
    own = sum(name in held for name in chain(root_key(FINGERPRINT, "owner"), tokens))
    return {"probes": probes, "tenants": tenant, "hits": hits, "own_hits": own, "own_pages": pages}


def _ask(engine: Engine, name: str, prompt: list[int], tenant: str) -> tuple[float, int]:
    """Seconds to the first token, and tokens that were cached."""
    params = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)
    start = perf_counter()
    engine.submit(GenerateRequest(name, prompt, params, tenant=tenant))
    while True:
        for output in engine.step():
            return perf_counter() - start, output.cached_tokens


def engine_probes(count: int, seed: int = 1) -> dict[str, Any]:
    """Half of the probes are of prompts that another tenant has cached just before, half of
    prompts that nobody has ever sent. Nothing of the difference may show."""
    engine = cached(small_model(2), pages=256, slots=2, state={"snapshots": 64})
    rng = np.random.default_rng(seed)
    seconds: dict[bool, list[float]] = {True: [], False: []}
    hits = own = 0
    for number in range(2 * count):
        prompt = rng.integers(0, VOCAB, 129).tolist()
        warm = bool(rng.integers(2))
        # In both cases a request of the owner's goes before, of this prompt or of another.
        other = prompt if warm else rng.integers(0, VOCAB, 129).tolist()
        _ask(engine, f"owner{number}", other, "owner")
        took, found = _ask(engine, f"probe{number}", prompt, "prober")
        seconds[warm].append(took)
        hits += found
        if number % 50 == 0:
            own += _ask(engine, f"own{number}", other, "owner")[1]
    test = ks_2samp(seconds[True], seconds[False])
    return {
        "probes": 2 * count,
        "cached_tokens_seen": hits,
        "owners_own_cached_tokens": own,
        "ks_statistic": round(float(test.statistic), 5),
        "ks_p": round(float(test.pvalue), 4),
        "median_ms": {
            "cached_by_another": round(float(np.median(seconds[True])) * 1e3, 3),
            "cached_by_nobody": round(float(np.median(seconds[False])) * 1e3, 3),
        },
    }


def main(arguments: list[str]) -> dict[str, Any]:
    parser = ArgumentParser(prog="python -m tests.bench state_isolation")
    parser.add_argument("--names", type=int, default=10_000_000)
    parser.add_argument("--requests", type=int, default=10_000, help="of each kind")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    return {
        "names": name_probes(options.names),
        "requests": engine_probes(options.requests),
    }
