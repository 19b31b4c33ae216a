"""The engine under test: a checkpoint's own engine, in this process."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random

import torch
from torch import Tensor

from expertmesh.actors.attention.engine import Engine
from expertmesh.actors.attention.settings import EngineSettings
from expertmesh.actors.exchange.base import LocalExchange
from expertmesh.actors.experts.bank import ExpertBank
from expertmesh.actors.model.batch import Batch
from expertmesh.actors.model.checkpoint import Checkpoint
from expertmesh.actors.model.config import load_config
from expertmesh.actors.model.model import Model
from expertmesh.actors.model.tokenizer import Tokenizer
from expertmesh.actors.state.model_state import ModelState, bytes_per_page, bytes_per_slot
from expertmesh.actors.state.offload.context import Offload
from expertmesh.actors.state.offload.opening import offload_of
from expertmesh.actors.state.opening import open_tiers
from expertmesh.actors.state.settings import StateSettings
from expertmesh.deploy.exit_codes import ExitCode, Refused
from expertmesh.kernels.registry import load_kernels

EXPERT_BYTES = 4 << 30
FINGERPRINT = b"subject"  # names its state; nobody else's is in a folder that it is given


class Subject:
    """A model that is loaded once, and engines over it, one at a time."""

    def __init__(self, folder: Path, context: int, dtype: torch.dtype = torch.float32) -> None:
        """context: tokens that a sequence may have, whatever the checkpoint promises. Raises
        Refused for a checkpoint without a tokenizer."""
        config = load_config(folder)
        tokenizer = Tokenizer.load(folder, config)
        if tokenizer is None:
            raise Refused(ExitCode.NO_MODEL, f"{folder.name} has no tokenizer")
        self.promised = config.max_position
        self.tokenizer = tokenizer
        self.config = config.model_copy(update={"max_position": max(context, self.promised)})
        source, kernels = Checkpoint.open(folder, self.config), load_kernels()
        experts = {layer: list(range(config.num_experts)) for layer in config.moe_layers}
        self._exchange = LocalExchange(
            ExpertBank(self.config, kernels, experts, source, dtype=dtype, cache_bytes=EXPERT_BYTES)
        )
        self._model = Model(self.config, kernels, source, dtype=dtype)

    @property
    def page_bytes(self) -> int:
        """Of 64 tokens over all MLA layers."""
        return bytes_per_page(self.config, self._model.dtype)

    @property
    def slot_bytes(self) -> int:
        """Of one sequence's KDA state, and of a snapshot."""
        return bytes_per_slot(self.config, self._model.dtype)

    @property
    def mla_layers(self) -> int:
        return self.config.num_layers - len(self.config.kda_layers)

    def offload(self, settings: StateSettings) -> Offload:
        """What contexts of these settings share. Raises Refused for a model without MLA layers."""
        offload = offload_of(self._model, settings)
        if offload is None:
            raise Refused(ExitCode.USAGE, "the model has no latents: there is nothing to keep")
        return offload

    def new_state(self, pages: int, slots: int) -> ModelState:
        return self._model.new_state(pages, slots)

    def forward(self, batch: Batch, state: ModelState) -> Tensor:
        """One step. Writes the state of every span; returns logits fp32 [R, V]."""
        return self._model.forward(batch, state, self._exchange)

    def random_prompt(self, seed: str, tokens: int) -> list[int]:
        """Text tokens that mean nothing; times and sizes do not depend on them."""
        rng = Random(seed)
        return [rng.randrange(self.tokenizer.ordinary) for _ in range(tokens)]

    @contextmanager
    def engine(
        self, settings: EngineSettings, transit_bytes: int | None = None
    ) -> Iterator[Engine]:
        """An engine with an empty device and with the tiers that its settings name; for its caller
        to step. transit_bytes: as TieredStore has it."""
        state = self._model.new_state(settings.pages, settings.slots, settings.state.places)
        arrived = threading.Event()
        tiers = open_tiers(state.layout, settings.state, arrived.set, transit_bytes)
        try:
            yield Engine(
                self._model, state, self._exchange, settings, self.config.eos,
                fingerprint=FINGERPRINT, store=tiers, arrived=arrived,
            )  # fmt: skip
        finally:
            if tiers is not None:
                tiers.close()
