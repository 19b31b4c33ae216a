"""Refuse at the door what could never run: every check names its field and the numbers.

Anything that indexes a logits row or the embedding is checked here, because an id out of range
would otherwise read or write a neighbour's row.
"""

import math
from dataclasses import dataclass
from typing import get_args

from expertmesh.actors.attention.messages import GenerateRequest, RequestRefused, SamplingParams
from expertmesh.actors.model.batch import PAGE_TOKENS
from expertmesh.actors.state.offload.room import OffloadRoom
from expertmesh.actors.state.pages import pages_for
from expertmesh.actors.state.settings import KvMode

MAX_PRIORITY = 1_000_000


@dataclass(frozen=True, slots=True)
class Limits:
    """vocab_size: ids are 0..vocab_size-1. max_context: tokens. pages: of the whole pool.
    eos_ids: the model's own end ids. kv_mode: of requests that name none. near_pages: most pages of
    a sequence whose old ones leave the device; 0 where they cannot. room: for these; None where
    there is enough for any."""

    vocab_size: int
    max_context: int
    pages: int
    max_logprobs: int
    eos_ids: frozenset[int] = frozenset()
    kv_mode: KvMode = "exact"
    near_pages: int = 0
    room: OffloadRoom | None = None

    def far(self, mode: str, tokens: int) -> bool:
        """Whether a sequence of so many tokens can have its old pages off the device."""
        return self.room is None or self.room.ever(self.room.far(mode, tokens))


def end_ids(params: SamplingParams, eos_ids: frozenset[int]) -> frozenset[int]:
    """The ids that end an answer. eos_ids: the model's own."""
    return frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else eos_ids)


def peak_tokens(prompt_tokens: int, max_tokens: int) -> int:
    """Most tokens a sequence ever keeps: its last token is handed out, never computed."""
    return prompt_tokens + max(max_tokens, 1) - 1


def check_request(request: GenerateRequest, limits: Limits) -> None:
    """Raises RequestRefused unless the request fits an otherwise empty engine."""
    _check_prompt(request, limits)
    _check_params(request.params, limits)
    _check_mode(request, limits)
    _check_size(request, limits)
    if request.resume_ids:
        _check_resumed(request, limits)
    if abs(request.priority) > MAX_PRIORITY:
        raise RequestRefused(
            f"priority {request.priority} is outside -{MAX_PRIORITY}..{MAX_PRIORITY}", "priority"
        )


def _check_prompt(request: GenerateRequest, limits: Limits) -> None:
    if not request.prompt_ids:
        raise RequestRefused("the prompt has no tokens", "prompt")
    _check_ids(request.prompt_ids, "prompt", limits)


def _check_ids(ids: list[int], field: str, limits: Limits) -> None:
    if min(ids) < 0 or max(ids) >= limits.vocab_size:
        at, bad = next((i, t) for i, t in enumerate(ids) if not 0 <= t < limits.vocab_size)
        raise RequestRefused(
            f"{field}: token id {bad} at position {at} is outside 0..{limits.vocab_size - 1} "
            f"(vocabulary of {limits.vocab_size})",
            field,
        )


def _check_mode(request: GenerateRequest, limits: Limits) -> None:
    known = get_args(KvMode)
    if request.kv_mode not in ("", *known):
        raise RequestRefused(
            f"kv_mode {request.kv_mode!r} is none of {', '.join(known)}", "kv_mode"
        )
    if request.kv_mode not in ("", "exact") and not limits.near_pages:
        raise RequestRefused(f"kv_mode {request.kv_mode}: not with this model", "kv_mode")


def _check_resumed(request: GenerateRequest, limits: Limits) -> None:
    """What has been handed out must be an answer that has not ended."""
    ids, params = request.resume_ids, request.params
    _check_ids(ids, "resume_ids", limits)
    if len(ids) >= params.max_tokens:
        raise RequestRefused(
            f"resume_ids: {len(ids)} tokens leave none of max_tokens {params.max_tokens}",
            "resume_ids",
        )
    if params.seed is None and params.temperature > 0 and params.top_k != 1:
        raise RequestRefused("seed: a sampled answer resumes only with the seed it had", "seed")
    ends = end_ids(params, limits.eos_ids)
    if not ends.isdisjoint(ids):
        at, end = next((i, t) for i, t in enumerate(ids) if t in ends)
        raise RequestRefused(
            f"resume_ids: token {end} at position {at} has ended the answer", "resume_ids"
        )


def _check_size(request: GenerateRequest, limits: Limits) -> None:
    prompt, new = len(request.prompt_ids), request.params.max_tokens
    if prompt + new > limits.max_context:
        raise RequestRefused(
            f"{prompt} prompt tokens and max_tokens {new} make {prompt + new}, the context holds "
            f"{limits.max_context}",
            "prompt" if prompt >= limits.max_context else "max_tokens",
        )
    peak, mode = peak_tokens(prompt, new), request.kv_mode or limits.kv_mode
    need, hint = pages_for(peak), ""
    if mode != "exact" and limits.far(mode, peak):
        need = min(need, limits.near_pages)
    elif mode != "exact" and limits.room is not None:
        hint = f"; off the device they {limits.room.shortage(limits.room.far(mode, peak))}"
    elif 0 < limits.near_pages <= limits.pages and not request.session:
        hint = "; kv_mode offload or select would serve it" if limits.far("select", peak) else ""
    if need > limits.pages:
        raise RequestRefused(
            f"{prompt} prompt tokens and max_tokens {new} need {need} pages of {PAGE_TOKENS} "
            f"tokens, the whole cache has {limits.pages}{hint}",
            "prompt" if pages_for(prompt) > limits.pages else "max_tokens",
        )


def _check_params(params: SamplingParams, limits: Limits) -> None:
    def within(field: str, value: float, low: float, high: float) -> None:
        if not low <= value <= high:  # also refuses NaN
            raise RequestRefused(f"{field} {value} is outside {low}..{high}", field)

    def known(field: str, ids: list[int]) -> None:
        for token in ids:
            if not 0 <= token < limits.vocab_size:
                raise RequestRefused(
                    f"{field}: {token} is outside the vocabulary 0..{limits.vocab_size - 1}", field
                )

    within("max_tokens", params.max_tokens, 0, math.inf)
    within("min_tokens", params.min_tokens, 0, math.inf)
    if params.min_tokens > params.max_tokens:
        raise RequestRefused(
            f"min_tokens {params.min_tokens} exceeds max_tokens {params.max_tokens}", "min_tokens"
        )
    within("temperature", params.temperature, 0.0, 1e6)
    within("min_p", params.min_p, 0.0, 1.0)
    if not 0.0 < params.top_p <= 1.0:
        raise RequestRefused(f"top_p {params.top_p} is outside (0, 1]", "top_p")
    if params.top_k < 1 and params.top_k != -1:
        raise RequestRefused(f"top_k {params.top_k} is neither -1 nor at least 1", "top_k")
    if params.seed is not None and not -(2**63) <= params.seed < 2**64:
        raise RequestRefused(f"seed {params.seed} does not fit 64 bits", "seed")
    known("stop_token_ids", params.stop_token_ids)
    _check_choice(params, limits)
    for field in ("logprobs", "prompt_logprobs"):
        count = getattr(params, field)
        if count is not None:
            within(field, count, 0, min(limits.max_logprobs, limits.vocab_size))
    if params.logit_bias:
        known("logit_bias", list(params.logit_bias))
        for bias in params.logit_bias.values():
            within("logit_bias", bias, -100.0, 100.0)
    within("presence_penalty", params.presence_penalty, -2.0, 2.0)
    within("frequency_penalty", params.frequency_penalty, -2.0, 2.0)
    if not 0.0 < params.repetition_penalty <= 1e6:
        raise RequestRefused(
            f"repetition_penalty {params.repetition_penalty} is not a positive number",
            "repetition_penalty",
        )


def _check_choice(params: SamplingParams, limits: Limits) -> None:
    """Some id must be allowed while min_tokens forbids every end id. Without one a step would find
    no finite logit and report a broken model."""
    eos_ids = frozenset[int]() if params.ignore_eos else limits.eos_ids
    if not params.min_tokens or len(params.stop_token_ids) + len(eos_ids) < limits.vocab_size:
        return  # no set to build for the usual few ids
    if len(eos_ids.union(params.stop_token_ids)) >= limits.vocab_size:
        raise RequestRefused(
            f"stop_token_ids and the model's end ids are all {limits.vocab_size} ids of the "
            f"vocabulary, so min_tokens {params.min_tokens} leaves no token to choose",
            "stop_token_ids",
        )
