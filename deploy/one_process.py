"""The whole server in one process: attention, all experts and the engine's thread, without Ray.

What `expertmesh serve --expert-actors 0` runs, and the twin that the distributed server is
compared with.
"""

from dataclasses import dataclass
from pathlib import Path

import torch

from expertmesh.actors.attention.engine import Engine
from expertmesh.actors.attention.loop import EngineLoop
from expertmesh.actors.attention.settings import EngineSettings
from expertmesh.actors.exchange.base import LocalExchange
from expertmesh.actors.experts.bank import ExpertBank
from expertmesh.actors.model.checkpoint import Checkpoint
from expertmesh.actors.model.config import ModelConfig, load_config
from expertmesh.actors.model.model import Model
from expertmesh.deploy.engine_client import LocalEngineClient
from expertmesh.kernels.registry import load_kernels

DEFAULT_CACHE_BYTES = 1 << 30


@dataclass(frozen=True)
class LocalServer:
    """A running engine and the client for it. `stop` ends its thread."""

    config: ModelConfig
    engine_loop: EngineLoop
    client: LocalEngineClient

    def stop(self) -> None:
        self.engine_loop.stop()


def start_local(
    folder: Path,
    settings: EngineSettings,
    *,
    dtype: torch.dtype = torch.float32,
    backend: str = "auto",
    expert_cache_bytes: int = DEFAULT_CACHE_BYTES,
) -> LocalServer:
    """Load a checkpoint folder and start serving it. Raises ConfigError, CheckpointError."""
    config = load_config(folder)
    source = Checkpoint.open(folder, config)
    try:
        kernels = load_kernels(backend)
        model = Model(config, kernels, source, dtype=dtype)
        everything = dict.fromkeys(config.moe_layers, range(config.num_experts))
        bank = ExpertBank(
            config, kernels, everything, source, dtype=dtype, cache_bytes=expert_cache_bytes
        )
    finally:
        source.close()
    engine = Engine(
        model,
        model.new_state(settings.pages, settings.slots),
        LocalExchange(bank),
        settings,
        config.eos,
    )
    client = LocalEngineClient()
    engine_loop = EngineLoop(engine, client.publish)
    client.attach(engine_loop)
    engine_loop.start()
    return LocalServer(config, engine_loop, client)
