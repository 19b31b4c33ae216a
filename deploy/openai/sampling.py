"""From a request's fields to the engine's SamplingParams, with every limit checked by name."""

import time

from expertmesh.actors.attention.messages import GenerateRequest, SamplingParams
from expertmesh.actors.constraint.spec import Constraint
from expertmesh.deploy.openai.errors import ApiError, bad
from expertmesh.deploy.openai.protocol import SamplingRequest
from expertmesh.deploy.openai.served import ServedModel


def check_model(model: str | None, served: ServedModel) -> None:
    """404 unless `model` is served here (None: not asked)."""
    if model is not None and model not in served.names:
        shown = model if len(model) <= 80 else model[:80] + "..."
        raise ApiError(
            404, f"the model '{shown}' is not served here", "model", code="model_not_found"
        )


def check_request(request: SamplingRequest, served: ServedModel, prompts: int) -> None:
    """What does not depend on the prompt's length. Raises ApiError."""
    check_model(request.model, served)
    limits, vocab = served.limits, served.vocab_size
    if request.stream_options is not None and not request.stream:
        raise bad("stream_options is only allowed when stream is true", "stream_options")
    if request.n > limits.n:
        raise bad(f"n must be 1 to {limits.n}, not {request.n}", "n")
    if request.n * prompts > limits.choices:
        raise bad(
            f"{prompts} prompts with n {request.n} make {request.n * prompts} choices; "
            f"at most {limits.choices} are served at once",
            "n",
        )
    if request.session_id is not None and request.n * prompts > 1:
        raise bad(
            f"a session goes on with one answer, and this request makes {request.n * prompts}",
            "session_id",
            "invalid_value",
        )
    if request.top_k == 0:
        raise bad("top_k must be -1 (off) or at least 1", "top_k")
    if len(request.stop_token_ids) > limits.stop_token_ids:
        raise bad(f"at most {limits.stop_token_ids} stop_token_ids", "stop_token_ids")
    check_ids(request.stop_token_ids, vocab, "stop_token_ids")
    if len(request.logit_bias) > limits.logit_bias:
        raise bad(f"logit_bias has at most {limits.logit_bias} tokens", "logit_bias")
    check_ids(list(request.logit_bias), vocab, "logit_bias")
    _check_stops(request, served)
    if request.return_routed_experts and not served.moe_layers:
        raise bad("this model reports no routed experts", "return_routed_experts")


def check_ids(ids: list[int], vocab_size: int, param: str) -> None:
    """400 naming the first id outside 0..vocab_size-1."""
    if ids and not (min(ids) >= 0 and max(ids) < vocab_size):
        wrong = next(token for token in ids if not 0 <= token < vocab_size)
        raise bad(
            f"token id {str(wrong)[:40]} is outside the vocabulary 0..{vocab_size - 1} "
            f"({vocab_size} tokens)",
            param,
        )


def check_length(characters: int, served: ServedModel, param: str) -> None:
    """Refuses text that can not fit whatever its tokens are: encoding 30 MB costs many seconds."""
    if served.longest_token is None:
        return
    least = characters // served.longest_token
    if least > served.max_model_len:
        raise bad(
            f"the context holds {served.max_model_len} tokens, but {characters} characters are at "
            f"least {least}",
            param,
            "context_length_exceeded",
        )


def _check_stops(request: SamplingRequest, served: ServedModel) -> None:
    limits = served.limits
    if request.stop and served.tokenizer is None:
        raise bad("stop needs text, and this checkpoint has no tokenizer", "stop")
    if len(request.stop) > limits.stops:
        raise bad(f"at most {limits.stops} stop strings, not {len(request.stop)}", "stop")
    for stop in request.stop:
        if not 1 <= len(stop) <= limits.stop_length:
            raise bad(f"a stop string has 1 to {limits.stop_length} characters", "stop")


def token_budget(
    request: SamplingRequest,
    served: ServedModel,
    prompt_tokens: int,
    asked: int | None,
    default: int | None,
    param: str,
    prompt_param: str = "prompt",
) -> int:
    """How many tokens to generate. asked: the client's limit. default: when it gave none (None:
    all that fits). Raises ApiError with the numbers when prompt and limit exceed the context."""
    context = served.max_model_len
    room = context - prompt_tokens
    if room < (0 if asked == 0 else 1):  # no limit would help, so it is the prompt's fault
        raise bad(
            f"the prompt has {prompt_tokens} tokens and leaves no room for an answer: the "
            f"context holds {context}",
            prompt_param,
            "context_length_exceeded",
        )
    if asked is None:
        budget = room if default is None else min(room, default)
        budget = max(budget, min(request.min_tokens, room))
    else:
        budget = asked
    if budget > room:
        raise bad(
            f"the context holds {context} tokens, but the prompt has {prompt_tokens} and {param} "
            f"asks for {budget}: {prompt_tokens + budget} in all",
            param,
            "context_length_exceeded",
        )
    if request.min_tokens > budget:
        raise bad(f"min_tokens {request.min_tokens} exceeds {param} {budget}", "min_tokens")
    return budget


def generate_requests(
    request: SamplingRequest,
    internal_id: str,
    tenant: str,
    prompt_ids: list[int],
    max_tokens: int,
    logprobs: int | None,
    prompt_logprobs: int | None,
    constraint: Constraint | None = None,
) -> list[GenerateRequest]:
    """n engine requests for one prompt. Choice i of a seeded request uses seed + i, so that the
    first choice equals an n=1 answer and the others differ from it. tenant: as tenant_of has it.
    constraint: of each answer."""
    out = []
    for index in range(request.n):
        params = SamplingParams(
            max_tokens=max_tokens,
            temperature=request.temperature,
            top_p=request.top_p,
            top_k=request.top_k,
            min_p=request.min_p,
            # Modulo 2^63: -1 is legal in the API, the engine's counter wants a plain number.
            seed=None if request.seed is None else (request.seed + index) % 2**63,
            min_tokens=request.min_tokens,
            stop_token_ids=request.stop_token_ids,
            ignore_eos=request.ignore_eos,
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
            logit_bias=request.logit_bias or None,
            presence_penalty=request.presence_penalty,
            frequency_penalty=request.frequency_penalty,
            repetition_penalty=request.repetition_penalty,
            want_routed_experts=request.return_routed_experts,
        )
        name = f"{internal_id}-{index}"
        out.append(
            GenerateRequest(
                name,
                prompt_ids,
                params,
                request.priority,
                constraint=constraint,
                tenant=tenant,
                session=request.session_id or "",
                kv_mode=request.kv_mode or "",
                arrived=time.time(),
            )
        )
    return out
