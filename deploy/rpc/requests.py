"""A GenerateRequest becomes what POST /v1/completions takes, so that both check it alike."""

from typing import Any

import msgspec
from google.protobuf.message import Message
from google.protobuf.unknown_fields import UnknownFieldSet
from pydantic import ValidationError

from expertmesh.deploy.auth.keys import ApiKey
from expertmesh.deploy.openai import completions
from expertmesh.deploy.openai.completions import CompletionGeneration
from expertmesh.deploy.openai.errors import bad, from_validation
from expertmesh.deploy.openai.protocol import CompletionRequest
from expertmesh.deploy.openai.served import ServedModel
from expertmesh.deploy.rpc.v1 import engine_pb2 as pb

# Outside of sampling_params, with the HTTP field's own name.
_STATE = ("cache_salt", "kv_mode", "session_id")
_TOP_LEVEL = ("model", "request_id", "priority", "stream", "return_routed_experts", *_STATE)


def prepare(
    request: pb.GenerateRequest, served: ServedModel, key: ApiKey | None
) -> CompletionGeneration:
    """Checks everything and tokenises. Touches no event loop, so that a large request can be
    prepared in a thread. key: see Generation. Raises ApiError with the HTTP API's names; see
    `field_name`."""
    _refuse_unknown(request, "")
    params = request.sampling_params
    body = _sampling(params) | {"prompt": _prompt(request, served)}
    prompt_logprobs = body.pop("prompt_logprobs", None)
    body["model"] = request.model if request.HasField("model") else served.name
    body["stream"] = request.stream if request.HasField("stream") else True
    body["priority"] = request.priority
    body["return_routed_experts"] = request.return_routed_experts
    if request.request_id:
        body["request_id"] = request.request_id
    body |= {field.name: value for field, value in request.ListFields() if field.name in _STATE}
    try:
        parsed = CompletionRequest.model_validate(body)
    except ValidationError as error:
        raise from_validation(error) from None
    generation = completions.prepare(parsed, served, key)
    if prompt_logprobs is not None:
        _score_prompt(generation, prompt_logprobs, served)
    return generation


def _refuse_unknown(message: Message, path: str) -> None:
    """A newer client's option that this server would drop changes the answer. Raises ApiError."""
    for unknown in UnknownFieldSet(message):  # type: ignore[attr-defined]
        where = path.rstrip(".") or "the request"
        raise bad(
            f"field number {unknown.field_number} of {where} is unknown to this server",
            path.rstrip(".") or None,
            "unknown_parameter",
        )
    for field, value in message.ListFields():
        if isinstance(value, Message):
            _refuse_unknown(value, f"{path}{field.name}.")


def _prompt(request: pb.GenerateRequest, served: ServedModel) -> str | list[int]:
    kind = request.WhichOneof("input")
    if kind is None:
        raise bad("one of 'tokenized' and 'text' is required", "input")
    if kind == "text":
        return request.text
    ids = request.tokenized.input_ids
    if len(ids) > served.max_model_len:  # before millions of numbers become objects
        raise bad(
            f"the context holds {served.max_model_len} tokens, but the prompt has {len(ids)}",
            "prompt",
            "context_length_exceeded",
        )
    return list(ids)


def _sampling(params: pb.SamplingParams) -> dict[str, Any]:
    """What is set, by its HTTP name. An explicit zero is set; an absent field is not."""
    body: dict[str, Any] = {}
    constraint = params.WhichOneof("constraint")
    for field, value in params.ListFields():
        name = field.name
        if name == constraint:
            body["structured_outputs"] = _constraint(name, value)
        elif name == "logit_bias":
            body[name] = dict(value)
        elif isinstance(value, bool | int | float | str):
            body[name] = value
        else:
            body[name] = list(value)
    return body


def _constraint(name: str, value: Any) -> dict[str, Any]:
    if name == "choice":
        return {"choice": list(value.choices)}
    return {"json" if name == "json_schema" else name: value}


def _score_prompt(generation: CompletionGeneration, top: int, served: ServedModel) -> None:
    most = served.limits.logprobs
    if top > most:
        raise bad(f"prompt_logprobs must be 0 to {most}, not {top}", "prompt_logprobs")
    for index, one in enumerate(generation.requests):
        params = msgspec.structs.replace(one.params, prompt_logprobs=min(top, served.vocab_size))
        generation.requests[index] = msgspec.structs.replace(one, params=params)


def field_name(param: str, request: pb.GenerateRequest) -> str:
    """Path of an HTTP parameter in the message: "prompt[3]" is "tokenized.input_ids[3]"."""
    name = next((param[:at] for at, sign in enumerate(param) if sign in ".["), param)
    rest = param[len(name) :]
    if name == "prompt":
        given_ids = request.WhichOneof("input") == "tokenized"
        return ("tokenized.input_ids" if given_ids else "text") + rest
    if name == "structured_outputs":
        return f"sampling_params.{request.sampling_params.WhichOneof('constraint')}"
    if name in pb.SamplingParams.DESCRIPTOR.fields_by_name and name not in _TOP_LEVEL:
        return f"sampling_params.{name}{rest}"
    return param
