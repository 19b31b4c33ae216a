"""The request models. Unknown keys are refused by name: a dropped option is a wrong answer that
looks right. Integers are strict (no "5", 5.0 or true), and null means absent everywhere.
"""

from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, WithJsonSchema, model_validator

from expertmesh.actors.state.settings import KvMode
from expertmesh.deploy.openai import chat_schema
from expertmesh.deploy.openai.fields import (
    LogitBias,
    PathError,
    Prompts,
    RequestId,
    Seed,
    SessionId,
    Texts,
    TokenCount,
)

Effort = Literal["low", "high", "max"]


def _null_is_allowed(schema: dict[str, Any]) -> None:
    """Null means absent, so what may be absent may be null."""
    required = schema.get("required", [])
    for name, field in schema.get("properties", {}).items():
        kinds = field.get("anyOf", [field])
        if name not in required and {"type": "null"} not in kinds and field.keys() - {"title"}:
            outer = {key: field.pop(key) for key in ("title", "default") if key in field}
            schema["properties"][name] = {"anyOf": [*kinds, {"type": "null"}]} | outer


class Strict(BaseModel):
    """Base of everything a client sends."""

    model_config = ConfigDict(
        extra="forbid", strict=True, frozen=True, json_schema_extra=_null_is_allowed
    )

    @model_validator(mode="before")
    @classmethod
    def _null_is_absent(cls, value: Any) -> Any:
        if isinstance(value, dict):
            return {key: item for key, item in value.items() if item is not None}
        return value


class StreamOptions(Strict):
    """include_usage: one more chunk with the totals. continuous_usage_stats: running totals in
    every chunk besides, which is vLLM's and needs include_usage."""

    include_usage: bool = False
    continuous_usage_stats: bool = False

    @model_validator(mode="after")
    def _together(self) -> Self:
        if self.continuous_usage_stats and not self.include_usage:
            raise PathError(".continuous_usage_stats", "needs include_usage")
        return self


class ResponseFormat(Strict):
    type: Annotated[str, Field(max_length=40)]
    json_schema: Any = None


class StructuredOutputs(Strict):
    """What the answer must be: exactly one of these. vLLM's names.

    json: a JSON schema, `true`, or a schema's JSON text. grammar: Lark or GBNF.
    """

    json_: Annotated[
        Any,
        Field(alias="json"),
        WithJsonSchema({"type": ["object", "boolean", "string"], "description": "A JSON schema."}),
    ] = None
    json_object: bool | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None

    def given(self) -> dict[str, Any]:
        """By the names that clients use."""
        return self.model_dump(by_alias=True)


class ChatTemplateOptions(Strict):
    """thinking: whether the model reasons first. thinking_effort: how long."""

    thinking: bool | None = None
    thinking_effort: Effort | None = None


class SamplingRequest(Strict):
    """What both generation endpoints share. Defaults are OpenAI's; extras are vLLM's by name."""

    # Known elsewhere and absent here: the answer says so, where "unknown field" would send the
    # reader looking for a spelling mistake.
    unsupported: ClassVar[tuple[str, ...]] = (
        "suffix", "functions", "function_call", "modalities", "audio", "prediction",
        "prompt_logprobs", "web_search_options", "bad_words",
        "use_beam_search", "length_penalty", "truncate_prompt_tokens", "add_special_tokens",
        "allowed_token_ids", "logits_processors", "kv_transfer_params", "service_tier", "store",
        "metadata", "verbosity", "continue_final_message", "add_generation_prompt", "documents",
    )  # fmt: skip

    # vLLM's former names.
    renamed: ClassVar[dict[str, str]] = {
        f"guided_{name}": f'structured_outputs: {{"{name}": ...}}'
        for name in ("json", "regex", "choice", "grammar")
    }

    model: Annotated[str, Field(min_length=1)]
    max_tokens: TokenCount | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] = 1.0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    top_k: Annotated[int, Field(ge=-1, lt=2**31)] = -1
    min_p: Annotated[float, Field(ge=0, le=1)] = 0.0
    n: Annotated[int, Field(ge=1)] = 1
    seed: Seed | None = None
    stop: Texts = []
    stop_token_ids: list[int] = []
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    min_tokens: TokenCount = 0
    ignore_eos: bool = False
    logit_bias: LogitBias = {}
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] = 0.0
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] = 0.0
    repetition_penalty: Annotated[float, Field(ge=0.01, le=100)] = 1.0
    stream: bool = False
    stream_options: StreamOptions | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    user: Annotated[str, Field(max_length=512)] | None = None
    request_id: RequestId | None = None
    # What is cached of a prompt is used by requests with the same key and the same salt only.
    cache_salt: Annotated[str, Field(min_length=1, max_length=256)] | None = None
    # How old tokens are read; see StateSettings. None: as the server is set.
    kv_mode: KvMode | None = None
    # The state that the request goes on from, where its prompt begins so, and leaves behind.
    session_id: SessionId | None = None
    priority: Annotated[int, Field(ge=-(10**6), le=10**6)] = 0
    return_token_ids: bool = False
    return_tokens_as_token_ids: bool = False
    return_routed_experts: bool = False

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage

    @property
    def continuous_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.continuous_usage_stats


class CompletionRequest(SamplingRequest):
    """POST /v1/completions. prompt is normalised to a list of texts or a list of id lists."""

    prompt: Prompts
    echo: bool = False
    logprobs: Annotated[int, Field(ge=0)] | None = None
    # How many answers to make and choose n from: here every answer made is given.
    best_of: Annotated[int, Field(ge=1)] | None = None


class ChatRequest(SamplingRequest):
    """POST /v1/chat/completions. messages, tools and tool_choice are checked where they are
    rendered (actors/model/chat.py): the chat format decides what it can express."""

    messages: Annotated[Any, WithJsonSchema(chat_schema.MESSAGES)]
    max_completion_tokens: TokenCount | None = None
    logprobs: bool = False
    top_logprobs: Annotated[int, Field(ge=0)] | None = None
    tools: Annotated[Any, WithJsonSchema(chat_schema.TOOLS)] = None
    tool_choice: Annotated[Any, WithJsonSchema(chat_schema.TOOL_CHOICE)] = None
    parallel_tool_calls: bool = True
    chat_template_kwargs: ChatTemplateOptions = ChatTemplateOptions()
    reasoning_effort: Literal["none", "low", "high", "max"] | None = None


class TokenizeRequest(Strict):
    """POST /tokenize. Text is encoded without any special token, whatever markers it contains."""

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[Any, WithJsonSchema(chat_schema.MESSAGES)] = None
    tools: Annotated[Any, WithJsonSchema(chat_schema.TOOLS)] = None
    chat_template_kwargs: ChatTemplateOptions = ChatTemplateOptions()
    return_token_strs: bool = False


class DetokenizeRequest(Strict):
    """POST /detokenize. Special tokens are shown by name unless skip_special_tokens."""

    model: str | None = None
    tokens: list[int]
    skip_special_tokens: bool = False
