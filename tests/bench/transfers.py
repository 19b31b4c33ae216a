"""What moving experts costs: the parts of a move, of a verified load, and steps beside moves.

Steps are decode steps of a whole engine whose experts live in two Ray actors; while `moving`, each
actor copies experts out of the other without a pause and drops them again.
"""

import argparse
import itertools
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import ray
import torch

from expertmesh.actors.attention.engine import Engine
from expertmesh.actors.exchange.mesh import MeshExchange
from expertmesh.actors.exchange.process_group import open_store
from expertmesh.actors.exchange.roster import Roster
from expertmesh.actors.exchange.settings import ExchangeSettings
from expertmesh.actors.experts import transfer
from expertmesh.actors.experts.actor import ExpertActor
from expertmesh.actors.experts.decoded import decode
from expertmesh.actors.experts.digests import derived_digest, packed_digest
from expertmesh.actors.model.checkpoint import ExpertWeights, PackedMatrix
from expertmesh.actors.model.loading import LoadSettings
from expertmesh.actors.model.model import Model
from expertmesh.kernels.registry import load_kernels
from tests.bench import load, machine, models
from tests.bench.engines import HOST, settings
from tests.support.runner import split_experts

SHAPES = {"nano": (96, 64), "wide": (512, 256), "k3": (3584, 3072)}  # latent, inner width
ACTORS = 2
SPARE = 32  # steps in which some requests still read their prompts


def main(arguments: list[str]) -> dict[str, Any]:
    parser = argparse.ArgumentParser(prog="transfers", description=__doc__)
    parser.add_argument("--model", default="nano")
    parser.add_argument("--concurrency", type=int, default=16)
    parser.add_argument("--windows", type=int, default=6, help="of each kind, alternating")
    parser.add_argument("--steps", type=int, default=300, help="of a window")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    facts = machine.facts()
    parts = {name: _parts(*shape) for name, shape in SHAPES.items()}
    steps = _steps(options.model, options.concurrency, options.windows, options.steps)
    return {"bench": "transfers", "machine": facts, "options": vars(options),
            "move_parts_ms": parts, "steps": steps}  # fmt: skip


def _parts(width: int, inner: int) -> dict[str, float]:
    """Of one expert of that shape, without the way between processes."""
    kernels = load_kernels()
    generator = torch.Generator().manual_seed(0)

    def matrix(rows: int, columns: int) -> PackedMatrix:
        packed = torch.randint(0, 256, (rows, columns // 2), generator=generator)
        scale = torch.randint(100, 140, (rows, columns // 32), generator=generator)
        return PackedMatrix(packed.byte(), scale.byte())

    weights = ExpertWeights(matrix(inner, width), matrix(width, inner), matrix(inner, width))
    made = decode(kernels, weights, torch.float32)
    packet = transfer.packet_of(0, 0, weights, transfer.Digests(0, 0))
    found = {
        "copy": _best(lambda: transfer.unpack(packet, torch.device("cpu"))),
        "decode": _best(lambda: decode(kernels, weights, torch.float32)),
        "digest_stored": _best(lambda: packed_digest(0, 0, weights)),
        "digest_derived": _best(lambda: derived_digest(0, 0, made.dense())),
    }
    verify = found["digest_stored"] + found["digest_derived"]
    found["packed_mb"] = weights.nbytes / 1e6
    found["verify_share_of_move"] = verify / (verify + found["copy"] + found["decode"])
    return found


def _best(job: Callable[[], object], times: int = 5) -> float:
    """Milliseconds."""
    seconds = []
    for _ in range(times):
        began = time.perf_counter()
        job()
        seconds.append(time.perf_counter() - began)
    return min(seconds) * 1e3


def _steps(model: str, concurrency: int, windows: int, steps: int) -> dict[str, Any]:
    """Windows of `steps` decode steps, with and without moves in turn."""
    times: dict[str, list[float]] = {"quiet": [], "moving": []}
    moved: list[float] = []
    with _mesh(model) as (engine, handles, held):
        layers = engine.model.config.moe_layers
        shuttles = [
            Shuttle.remote(handles[source], handles[1 - source], layers, ids)
            for source, ids in enumerate(held)
        ]
        _window(engine, concurrency, steps)  # a warm-up
        for _ in range(windows):
            times["quiet"] += _window(engine, concurrency, steps)
            running = [shuttle.run.remote() for shuttle in shuttles]
            ray.get([shuttle.ready.remote() for shuttle in shuttles])
            times["moving"] += _window(engine, concurrency, steps)
            ray.get([shuttle.halt.remote() for shuttle in shuttles])
            moved += itertools.chain(*ray.get(running))
        failures = sum(ray.get(handle.stats.remote()).transfer_failures for handle in handles)
    result: dict[str, Any] = {kind: _summary(found) for kind, found in times.items()}
    result["moving / quiet"] = {
        name: result["moving"][name] / result["quiet"][name] for name in result["quiet"]
    }
    total_s = sum(times["moving"]) / 1e3
    return result | {"move_ms": _summary(moved), "moves_per_s": len(moved) / total_s,
                     "failures": failures, "target": "p99 moving / quiet <= 1.1"}  # fmt: skip


def _window(engine: Engine, concurrency: int, steps: int) -> list[float]:
    """Milliseconds of each decode step of `concurrency` requests."""
    for n, prompt in enumerate(load.prompts(concurrency, engine.model.config.vocab_size)):
        engine.submit(load.greedy(f"r{n}", prompt, steps + SPARE))
    found: list[float] = []
    while engine.has_work:
        began = time.perf_counter()
        outputs = engine.step()
        if len(outputs) == concurrency:
            found.append((time.perf_counter() - began) * 1e3)
        if engine.failed is not None:
            raise RuntimeError(engine.failed)
    return found[:steps]


def _summary(times: list[float]) -> dict[str, float]:
    return {"p50": float(np.percentile(times, 50)), "p99": float(np.percentile(times, 99)),
            "mean": float(np.mean(times))}  # fmt: skip


@ray.remote(max_concurrency=2)
class Shuttle:
    """Copies every expert of one actor into the other, over and over: one more process, as the
    one that carries out plans is."""

    def __init__(self, source: Any, target: Any, layers: Sequence[int], ids: Sequence[int]) -> None:
        self._source, self._target = source, target
        self._keys = [(layer, expert) for layer in layers for expert in ids]
        self._halt, self._began = threading.Event(), threading.Event()

    def run(self) -> list[float]:
        """Returns the milliseconds of each move."""
        found = []
        self._halt.clear()
        for layer, expert in itertools.cycle(self._keys):
            began = time.perf_counter()
            ray.get(self._target.adopt.remote(layer, expert, self._source, 10.0))
            found.append((time.perf_counter() - began) * 1e3)
            self._began.set()
            ray.get(self._target.drop.remote({layer: [expert]}, 0))
            if self._halt.is_set():
                self._began.clear()
                return found
        raise AssertionError("a cycle has no end")

    def ready(self) -> None:
        self._began.wait(30)

    def halt(self) -> None:
        self._halt.set()


@contextmanager
def _mesh(model: str) -> Iterator[tuple[Engine, list[Any], list[list[int]]]]:
    """The attention half in this process, the experts in Ray actors of one thread each."""
    opened = LoadSettings(model=models.checkpoint(model), device="cpu").open()
    config, exchange_settings = opened.config, ExchangeSettings()
    held = split_experts(config.num_experts, ACTORS)
    env = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive", "PYTHONPATH": os.getcwd()}
    ray.init(address="local", num_cpus=8, object_store_memory=256 << 20, include_dashboard=False,
             log_to_driver=False, runtime_env={"env_vars": env})  # fmt: skip
    try:
        load_settings = LoadSettings(model=models.checkpoint(model), device="cpu")
        actor = ray.remote(ExpertActor).options(max_concurrency=12)
        handles = [actor.remote(load_settings, exchange_settings) for _ in held]
        ray.get([handle.settle.remote(HOST, 1) for handle in handles])
        ray.get([
            handle.load.remote(dict.fromkeys(config.moe_layers, ids))
            for handle, ids in zip(handles, held, strict=True)
        ])  # fmt: skip
        store, address = open_store(HOST)
        roster = Roster(1, 1, ACTORS, dict.fromkeys(config.moe_layers, held), address)
        meeting = [handle.prepare.remote(roster, 1 + i) for i, handle in enumerate(handles)]
        exchange = MeshExchange(
            roster, 0, exchange_settings, width=config.latent_size,
            top_k=config.experts_per_token, num_experts=config.num_experts, host=HOST,
            dtype=torch.float32,
        )  # fmt: skip
        ray.get(meeting)
        options = settings()
        whole = Model(config, opened.kernels, opened.source, dtype=opened.dtype)
        state = whole.new_state(options.pages, options.slots)
        yield Engine(whole, state, exchange, options, config.eos), handles, held
        exchange.close()
        del store
    finally:
        ray.shutdown()
