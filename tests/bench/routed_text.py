"""Real routing: which experts a model picks on text, recorded through the engine's own report."""

import pydoc_data.topics
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from expertmesh.actors.attention.engine import Engine
from expertmesh.actors.attention.settings import EngineSettings
from expertmesh.actors.exchange.base import LocalExchange
from expertmesh.actors.experts.bank import ExpertBank
from expertmesh.actors.model.loading import LoadSettings
from expertmesh.actors.model.model import Model
from expertmesh.actors.model.tokenizer import Tokenizer
from tests.support.engines import finish, request

PIECE = 512
SETTINGS = EngineSettings(pages=160, slots=16)


def default_text() -> str:
    """English that comes with Python: its help topics, 460 kB."""
    return "\n".join(text for _, text in sorted(pydoc_data.topics.topics.items()))


def routing(model: Path, text: str, tokens: int) -> tuple[tuple[int, ...], int, NDArray[np.int16]]:
    """(MoE layers, experts, int16 [about `tokens`, L, K]): of the text's first tokens, in order.

    The text is read in pieces without context.
    """
    opened = LoadSettings(model=model).open()
    config = opened.config
    tokenizer = Tokenizer.load(model, config)
    assert tokenizer is not None
    with torch.inference_mode():
        net = Model(config, opened.kernels, opened.source, dtype=opened.dtype)
        everywhere = dict.fromkeys(config.moe_layers, range(config.num_experts))
        bank = ExpertBank(config, opened.kernels, everywhere, opened.source, dtype=opened.dtype,
                          cache_bytes=64 << 20)  # fmt: skip
        engine = Engine(net, net.new_state(SETTINGS.pages, SETTINGS.slots), LocalExchange(bank),
                        SETTINGS, config.eos)  # fmt: skip
        ids = tokenizer.encode(text)[:tokens]
        pieces = [ids[i : i + PIECE] for i in range(0, len(ids), PIECE)]
        for i, piece in enumerate(pieces):
            engine.submit(request(f"{i:06}", piece, 1, want_routed_experts=True))
        answers = finish(engine)
    shape = (-1, len(config.moe_layers), config.experts_per_token)
    parts = [np.frombuffer(a.routed, "<i2").reshape(shape) for _, a in sorted(answers.items())]
    return config.moe_layers, config.num_experts, np.concatenate(parts)
