"""What the front door knows of the model behind it, and the limits it enforces."""

import time
from dataclasses import dataclass, field

from expertmesh.actors.model.tokenizer import Tokenizer

MEGABYTE = 1 << 20


@dataclass(frozen=True, slots=True)
class Limits:
    """What one client may ask for. Every number here appears in the error that enforces it."""

    body_bytes: int = 32 * MEGABYTE
    json_depth: int = 128
    # Requests in this process; more are answered 429 at once, never queued without bound.
    requests: int = 2048
    # Choices (prompts x n) of one request: each is a sequence of its own in the engine.
    choices: int = 1024
    n: int = 128
    stops: int = 16
    stop_length: int = 1024
    stop_token_ids: int = 256
    # Each is added to a logit in every step.
    logit_bias: int = 1024
    logprobs: int = 20
    tools: int = 512
    # From the head of a request to the end of its body.
    upload_seconds: float = 120.0
    # From acceptance to the last token. A stalled engine ends in an error, never in a hang.
    request_seconds: float = 3600.0
    # A silent stream gets a comment this often: proxies cut connections that say nothing.
    keep_alive_seconds: float = 15.0
    # Stream chunks a second of this process. Above it, tokens of one stream share a chunk.
    chunks_per_second: float = 1000.0


@dataclass(frozen=True, slots=True)
class ServedModel:
    """name: the id clients use. root: where the weights came from. moe_layers, top_k: the shape
    of routed_experts. family, layers, experts (of a MoE layer), eos: told to who asks."""

    name: str
    root: str
    max_model_len: int
    vocab_size: int
    tokenizer: Tokenizer | None
    moe_layers: int = 0
    top_k: int = 0
    family: str = ""
    layers: int = 0
    experts: int = 0
    eos: tuple[int, ...] = ()
    # Bytes of the longest text token: what a text holds at least in tokens, before encoding it.
    longest_token: int | None = None
    aliases: tuple[str, ...] = ()
    created: int = field(default_factory=lambda: int(time.time()))
    limits: Limits = Limits()

    @property
    def names(self) -> tuple[str, ...]:
        return (self.name, *self.aliases)
