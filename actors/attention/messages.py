"""What crosses the border of an attention replica: requests in, tokens and counters out.

Token log-probabilities are those of the model itself: before temperature, penalties, bias and
masks. LOGPROB_FLOOR stands for anything lower, minus infinity included, so that every number
survives JSON.
"""

from typing import Literal

import msgspec

from expertmesh.actors.attention.timings import Timings
from expertmesh.actors.constraint.spec import Constraint
from expertmesh.actors.state.stats import CacheStats

LOGPROB_FLOOR = -9999.0
FinishReason = Literal["stop", "length", "abort", "error"]


class RequestRefused(ValueError):
    """The request can never be served as it stands. `field` names the parameter at fault."""

    def __init__(self, message: str, field: str) -> None:
        super().__init__(message, field)  # all arguments, so that it survives pickling
        self.message, self.field = message, field

    def __str__(self) -> str:
        return self.message


class QuotaExceeded(RequestRefused):
    """So it is for as long as its tenant has as much as it may have."""


class EngineBusy(RuntimeError):
    """The queue is full. The same request may succeed later."""


class EngineFailed(RuntimeError):
    """The engine has stopped for good; the message says why."""


class SamplingParams(msgspec.Struct, kw_only=True, frozen=True, omit_defaults=True):
    """How to continue a prompt. Ranges are checked by validation.check_request.

    max_tokens: 0 scores the prompt only. top_k: -1 = off. seed: None draws one per request.
    min_tokens: no end id before this many tokens. stop_token_ids: end ids besides the model's.
    logprobs / prompt_logprobs: alternatives per token; None = off, 0 = the token itself only.
    Penalties: presence and frequency see generated tokens, repetition the prompt as well.
    """

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0
    seed: int | None = None
    min_tokens: int = 0
    stop_token_ids: list[int] = []
    ignore_eos: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    logit_bias: dict[int, float] | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    want_routed_experts: bool = False


class GenerateRequest(msgspec.Struct, frozen=True, omit_defaults=True):
    """priority: lower numbers are served first, as in vLLM.

    resume_ids: tokens of the answer that some engine has already handed out, with all that belongs
    to them. The engine goes on after them, to the last bit as if it had generated them itself, and
    hands out only what is new. Sampled requests need the seed they began with.

    constraint: the texts that the answer may be. Whoever takes requests from outside has checked
    that it compiles (see actors/constraint/trial.py); one that fails nevertheless ends its request
    with an error.

    tenant: whose cached state it may use and adds to; nobody else's (an API key's name, a salt).
    session: the tenant's name for the state that the request goes on from, where its prompt begins
    with that state's tokens, and leaves behind. kv_mode: see StateSettings; "" = the engine's.
    arrived: when the front door took it, seconds since 1970: a session that was deleted since is
    not brought back. 0: when the engine takes it.
    """

    request_id: str
    prompt_ids: list[int]
    params: SamplingParams
    priority: int = 0
    resume_ids: list[int] = []
    constraint: Constraint | None = None
    tenant: str = ""
    session: str = ""
    kv_mode: str = ""
    arrived: float = 0.0


class KvReport(msgspec.Struct, kw_only=True, omit_defaults=True):
    """How a request's old tokens were read, where that was not exactly: mode, bits of what stood
    for them, pages read exactly and pages taken as an estimate (both summed over steps and layers),
    and the largest bound on the relative error of an attention output: "certificate" when it is
    proven, "estimate" when it is not."""

    mode: str
    bits: float = 0.0
    read_pages: int = 0
    estimated_pages: int = 0
    bound: float = 0.0
    bound_kind: str = "estimate"

    def after(self, before: "KvReport | None") -> "KvReport":
        """Of the whole request: this engine has gone on where another one was lost. What holds
        everywhere is the weaker of two claims."""
        if before is None:
            return self
        proven = self.bound_kind == before.bound_kind == "certificate"
        return KvReport(
            mode=self.mode,
            bits=self.bits or before.bits,
            read_pages=before.read_pages + self.read_pages,
            estimated_pages=before.estimated_pages + self.estimated_pages,
            bound=max(before.bound, self.bound),
            bound_kind="certificate" if proven else "estimate",
        )


class TokenLogprobs(msgspec.Struct, frozen=True):
    """rank: 1 = most likely. top: the most likely tokens with their log-probabilities, best first;
    the token itself is among them only when it is that likely."""

    token_id: int
    logprob: float
    rank: int
    top: list[tuple[int, float]]


class TokenOutput(msgspec.Struct, kw_only=True, omit_defaults=True):
    """What one step adds to one request.

    token_ids: the new tokens, an end id included. logprobs: parallel to token_ids. prompt_logprobs:
    once, with the first output; entry 0 is None. stop_reason: the stop_token_ids entry that ended
    the text, None for the model's own end ids. routed_experts: int16 little-endian
    [positions, MoE layers, top_k] of the positions computed since the last output, from the
    prompt's first on; the last generated token is never computed and has no entry. A resumed
    request reports neither the prompt nor positions that were reported before. cached_tokens: of
    the prompt, not computed for this request. kv: of all steps so far, unless all was exact.
    error: why it ended so; also of an abort that nobody asked for, after which another engine may
    go on. lost: the engine has failed, not the request; another engine can go on with it.
    error_field: the part of the request that the error is about, where it is the request's own.
    """

    request_id: str
    token_ids: list[int] = []
    logprobs: list[TokenLogprobs] | None = None
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | None = None
    error: str | None = None
    error_field: str | None = None
    lost: bool = False
    routed_experts: bytes | None = None
    prompt_tokens: int = 0
    cached_tokens: int = 0
    kv: KvReport | None = None


class EngineStats(msgspec.Struct, kw_only=True):
    """Gauges of this moment, and counters since the engine started.

    waiting_tokens: those of requests that wait, or whose prompt is under way, still to be computed.
    prompt_tokens: of sequences whose prompt has been computed, each counted once however often it
    was preempted, and not again where it resumes. generation_tokens: tokens handed out.
    recomputed_tokens: rows that a preemption or a resumed request made the model compute again.
    Seconds add up over all steps: plan, forward, sample, publish. page_bytes, slot_bytes: of one
    page of latents over all layers, and of one sequence's KDA state.
    """

    running: int = 0
    waiting: int = 0
    waiting_tokens: int = 0
    pages_total: int = 0
    pages_free: int = 0
    slots_total: int = 0
    slots_free: int = 0
    page_bytes: int = 0
    slot_bytes: int = 0
    steps: int = 0
    prompt_tokens: int = 0
    generation_tokens: int = 0
    recomputed_tokens: int = 0
    preemptions: int = 0
    finished_stop: int = 0
    finished_length: int = 0
    finished_abort: int = 0
    finished_error: int = 0
    plan_seconds: float = 0.0
    forward_seconds: float = 0.0
    sample_seconds: float = 0.0
    publish_seconds: float = 0.0
    timings: Timings = msgspec.field(default_factory=Timings)
    cache: CacheStats = msgspec.field(default_factory=CacheStats)
    failed: str | None = None
