"""A model with both kinds of state that takes a step in about a millisecond, for whole schedules.

KDA, MLA, KDA, MLA with blocks of residuals, float32, no routed experts unless asked for: those hold
no state. Vocabulary 64, so a token is a byte of a document's alphabet.
"""

import tempfile
import threading
from functools import cache
from pathlib import Path
from typing import Any

import torch

from expertmesh.actors.attention.engine import Engine
from expertmesh.actors.attention.settings import EngineSettings
from expertmesh.actors.model.forward import EagerRunner
from expertmesh.actors.model.graphs import GraphRunner
from expertmesh.actors.model.model import Model
from expertmesh.actors.state.model_state import ModelState
from expertmesh.actors.state.settings import StateSettings
from tests.support.checkpoints import write_checkpoint
from tests.support.graph_tape import Tape
from tests.support.padded_kernels import padded_torch
from tests.support.runner import Runner

VOCAB = 64
# What no state may be read from: finite where a masked row is multiplied by zero, else not.
STALE_LATENT, STALE_STATE = 777.0, torch.nan

SIZES: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 32, "moe_intermediate_size": 32,
    "routed_expert_hidden_size": 32, "num_attention_heads": 2, "kv_lora_rank": 16,
    "q_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 8,
    "vocab_size": VOCAB, "num_experts": 4, "max_position_embeddings": 1 << 17,
}  # fmt: skip


@cache
def small_model(
    layers: int = 4, *, experts: bool = False, graphs: bool = False, seed: int = 0
) -> Runner:
    """layers: every second one is MLA. experts: in every layer but the first. graphs: decode passes
    are recorded, with the same bits."""
    tape = Tape()
    with tempfile.TemporaryDirectory() as folder:
        write_checkpoint(
            Path(folder), num_hidden_layers=layers, seed=seed, shards=1,
            first_k_dense_replace=1 if experts else layers,
            linear_attn_config={"num_heads": 2, "head_dim": 8,
                                "full_attn_layers": list(range(2, layers + 1, 2))},
            **SIZES,
        )  # fmt: skip
        kernels = padded_torch(tape.opaque) if graphs else None
        runner = Runner(Path(folder), slots=1, pages_each=1, kernels=kernels)
    if graphs:
        model = runner.model
        model.runner = GraphRunner(model, EagerRunner(model, model.uploads), tape)
    return runner


def poison(state: ModelState) -> None:
    """Fills everything with what must never be seen: nothing is read that was not written."""
    state.caches.fill_(STALE_LATENT)
    state.kda.fill_(STALE_STATE)
    state.conv.fill_(STALE_STATE)
    state.saved_kda.fill_(STALE_STATE)
    state.saved_conv.fill_(STALE_STATE)


def poisoned(model: Model, pages: int, slots: int, snapshots: int = 0) -> ModelState:
    state = model.new_state(pages, slots, snapshots)
    poison(state)
    return state


def cacheless(runner: Runner, pages: int = 64, slots: int = 8, **settings: Any) -> Engine:
    """An engine that shares nothing between requests."""
    settings.setdefault("state", StateSettings(prefix_cache=False, host_bytes=0))
    return Engine(
        runner.model,
        poisoned(runner.model, pages, slots),
        runner.exchange,
        EngineSettings(**settings),
        [],
    )


def cached(
    runner: Runner,
    pages: int = 64,
    slots: int = 8,
    store: Any = None,
    state: dict[str, Any] | None = None,
    arrived: threading.Event | None = None,
    fingerprint: bytes = b"small",
    **settings: Any,
) -> Engine:
    """An engine whose requests share prefixes. state: of StateSettings; no tier below the device
    but `store`, which sets `arrived`."""
    cache = StateSettings(**{"host_bytes": 0, "snapshots": 16, "ladder_tokens": 64} | (state or {}))
    return Engine(
        runner.model,
        poisoned(runner.model, pages, slots, cache.snapshots),
        runner.exchange,
        EngineSettings(state=cache, **settings),
        [],
        fingerprint=fingerprint,
        store=store,
        arrived=arrived,
    )
