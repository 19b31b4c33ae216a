"""Engines built by hand, without Ray or HTTP: one process, or experts in processes of their own.

What the product adds around them is measured by `http` and `two_tier`; these serve the profile and
the engine's own numbers.
"""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from expertmesh.actors.attention.engine import Engine
from expertmesh.actors.attention.settings import EngineSettings
from expertmesh.actors.exchange.base import Exchange, LocalExchange
from expertmesh.actors.exchange.mesh import MeshExchange
from expertmesh.actors.exchange.process_group import open_store
from expertmesh.actors.exchange.roster import Roster
from expertmesh.actors.exchange.serve import MeshServer
from expertmesh.actors.exchange.settings import ExchangeSettings
from expertmesh.actors.experts.bank import ExpertBank
from expertmesh.actors.model.batch import PAGE_TOKENS
from expertmesh.actors.model.checkpoint import Checkpoint
from expertmesh.actors.model.config import ModelConfig, load_config
from expertmesh.actors.model.model import Model
from expertmesh.kernels.registry import load_kernels
from tests.support.runner import split_experts

HOST = "127.0.0.1"
CACHE_BYTES = 4 << 30  # all experts of the measured models stay decoded, in every system
SLOTS = 32
CONTEXT_TOKENS = 1024


def settings(**overrides: object) -> EngineSettings:
    pages = SLOTS * CONTEXT_TOKENS // PAGE_TOKENS
    return EngineSettings(**{"pages": pages, "slots": SLOTS} | overrides)  # type: ignore[arg-type]


def _bank(source: Checkpoint, config: ModelConfig, held: list[int]) -> ExpertBank:
    placed = dict.fromkeys(config.moe_layers, held)
    return ExpertBank(
        config, load_kernels(), placed, source, dtype=torch.float32, cache_bytes=CACHE_BYTES
    )


def _engine(
    source: Checkpoint, config: ModelConfig, exchange: Exchange, options: EngineSettings
) -> Engine:
    model = Model(config, load_kernels(), source)
    state = model.new_state(options.pages, options.slots)
    return Engine(model, state, exchange, options, config.eos)


def local_engine(folder: Path, options: EngineSettings | None = None) -> Engine:
    """Everything in this process."""
    config = load_config(folder)
    source = Checkpoint.open(folder, config)
    exchange = LocalExchange(_bank(source, config, list(range(config.num_experts))))
    return _engine(source, config, exchange, options or settings())


@contextmanager
def mesh_engine(
    folder: Path, experts: int = 2, threads: int = 1, options: EngineSettings | None = None
) -> Iterator[Engine]:
    """The attention half here, `experts` processes with `threads` each for the rest."""
    config = load_config(folder)
    source = Checkpoint.open(folder, config)
    held = split_experts(config.num_experts, experts)
    store, address = open_store(HOST)
    roster = Roster(1, 1, experts, dict.fromkeys(config.moe_layers, held), address)
    shape = {"width": config.latent_size, "top_k": config.experts_per_token}
    processes = []
    try:
        for actor in range(experts):
            order = {"folder": str(folder), "held": held, "actor": actor, "store": address}
            processes.append(
                subprocess.Popen(
                    [sys.executable, "-m", "tests.bench.engines", json.dumps(order)],
                    env=os.environ | {"OMP_NUM_THREADS": str(threads)},
                )
            )
        exchange = MeshExchange(
            roster, 0, ExchangeSettings(), **shape, num_experts=config.num_experts, host=HOST
        )
        yield _engine(source, config, exchange, options or settings())
        exchange.close()
        for process in processes:
            process.wait(20)
    finally:
        for process in processes:
            process.kill()
            process.wait()
        del store


def _serve_experts(folder: Path, held: list[list[int]], actor: int, store: list[object]) -> None:
    """The main of an expert process."""
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    config = load_config(folder)
    host, port = store
    address = (str(host), int(str(port)))
    roster = Roster(1, 1, len(held), dict.fromkeys(config.moe_layers, held), address)
    source = Checkpoint.open(folder, config)
    bank = _bank(source, config, held[actor])
    server = MeshServer(
        roster, 1 + actor, ExchangeSettings(), bank, width=config.latent_size,
        top_k=config.experts_per_token, dtype=torch.float32, host=HOST,
    )  # fmt: skip
    with torch.inference_mode():
        server.run()


if __name__ == "__main__":
    _serve_experts(**json.loads(sys.argv[1]))
