"""The whole server in one process: attention, all experts and the engine's thread, without Ray.

What `expertmesh serve --expert-actors 0` runs, and the twin that the distributed server is
compared with.
"""

import threading
from dataclasses import dataclass

import torch

from expertmesh.actors.attention.engine import Engine
from expertmesh.actors.attention.loop import EngineLoop
from expertmesh.actors.attention.settings import EngineSettings
from expertmesh.actors.constraint.compiler import Grammars
from expertmesh.actors.exchange.base import LocalExchange
from expertmesh.actors.experts.bank import ExpertBank
from expertmesh.actors.model.config import ModelConfig
from expertmesh.actors.model.loading import LoadSettings
from expertmesh.actors.model.model import Model
from expertmesh.actors.model.tokenizer import Tokenizer
from expertmesh.actors.state.fingerprint import fingerprint
from expertmesh.actors.state.opening import open_tiers
from expertmesh.actors.state.tiers.store import TieredStore
from expertmesh.deploy.engine_client import LocalEngineClient


@dataclass(frozen=True)
class LocalServer:
    """A running engine and the client for it. `stop` ends its thread."""

    config: ModelConfig
    engine_loop: EngineLoop
    client: LocalEngineClient
    tiers: TieredStore | None = None

    def stop(self) -> None:
        self.engine_loop.stop()
        if self.tiers is not None:
            self.tiers.close()


def start_local(load: LoadSettings, settings: EngineSettings, threads: int = 1) -> LocalServer:
    """Load a checkpoint and start serving it.

    Raises ConfigError, CheckpointError, TokenizerError.
    """
    torch.set_num_threads(threads)
    opened = load.open()
    config, source = opened.config, opened.source
    dtype, device = opened.dtype, opened.device
    try:
        model = Model(config, opened.kernels, source, dtype=dtype, device=device)
        bank = ExpertBank(
            config,
            opened.kernels,
            dict.fromkeys(config.moe_layers, range(config.num_experts)),
            source,
            dtype=dtype,
            device=device,
            cache_bytes=load.expert_cache_bytes,
        )
    finally:
        source.close()
    state = model.new_state(settings.pages, settings.slots, settings.state.places)
    grammars = Grammars.of(Tokenizer.load(load.model, config), config.eos)
    arrived = threading.Event()
    tiers = open_tiers(state.layout, settings.state, arrived.set)
    engine = Engine(
        model, state, LocalExchange(bank), settings, config.eos, grammars,
        fingerprint=fingerprint(opened, load), store=tiers, arrived=arrived,
    )  # fmt: skip
    client = LocalEngineClient()
    engine_loop = EngineLoop(engine, client.publish)
    client.attach(engine_loop)
    engine_loop.start()
    return LocalServer(config, engine_loop, client, tiers)
