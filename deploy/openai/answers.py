"""The answers, as /openapi.json describes them.

Answers are written as bytes where they arise, since a token must not cost a tree of objects. These
models say what comes out; the fuzz test holds every answer of the server against them.
"""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from expertmesh.actors.state.settings import KvMode

Finish = Literal["stop", "length", "tool_calls"]
Logprob = Annotated[float, Field(ge=-9999, le=0)]
Byte = Annotated[int, Field(ge=0, le=255)]
Count = Annotated[int, Field(ge=0)]


class Answer(BaseModel):
    """What the server sends: nothing besides the fields named here."""

    model_config = ConfigDict(extra="forbid")


class ErrorBody(Answer):
    """param: the request's field at fault."""

    message: Annotated[str, Field(min_length=1)]
    type: str
    param: str | None
    code: str | None


class ErrorAnswer(Answer):
    error: ErrorBody


class PromptDetails(Answer):
    cached_tokens: Count


class CompletionDetails(Answer):
    reasoning_tokens: Count


class Usage(Answer):
    prompt_tokens: Count
    completion_tokens: Count
    total_tokens: Count
    prompt_tokens_details: PromptDetails
    completion_tokens_details: CompletionDetails


class CompletionUsage(Answer):
    prompt_tokens: Count
    completion_tokens: Count
    total_tokens: Count
    prompt_tokens_details: PromptDetails


class KvRead(Answer):
    """How a choice read its old tokens, where not exactly: bits of what stood for them, pages read
    exactly and pages taken as an estimate (over steps and layers), and the largest bound on the
    relative error of an attention output, which is proven when bound_kind is "certificate"."""

    mode: KvMode
    bits: Annotated[float, Field(ge=0)]
    read_pages: Count
    estimated_pages: Count
    bound: Annotated[float, Field(ge=0)]
    bound_kind: Literal["certificate", "estimate"]


class Ended(Answer):
    """What only a finished choice has. stop_reason: the stop string or token id that ended it.
    routed_experts: base64 of a .npy file. kv: absent where old tokens were read exactly."""

    stop_reason: str | int | None = None
    routed_experts: str = ""
    kv: KvRead | None = None
    token_ids: list[int] = []
    prompt_token_ids: list[int] = []


class Logprobs(Answer):
    """Parallel arrays; the first token of a prompt has no probability."""

    text_offset: list[Count]
    token_logprobs: list[Logprob | None]
    tokens: list[str]
    top_logprobs: list[dict[str, Logprob] | None]


class CompletionChoice(Ended):
    index: Count
    text: str
    logprobs: Logprobs | None
    finish_reason: Finish | None


class CompletionAnswer(Answer):
    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: CompletionUsage


class CompletionChunk(Answer):
    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: CompletionUsage | None = None


class TokenLogprob(Answer):
    token: str
    logprob: Logprob
    bytes: list[Byte] | None


class ContentLogprob(TokenLogprob):
    top_logprobs: list[TokenLogprob]


class ChatLogprobs(Answer):
    content: list[ContentLogprob]


class CalledFunction(Answer):
    """arguments: a JSON object as text."""

    name: str
    arguments: str


class CalledTool(Answer):
    id: str
    type: Literal["function"]
    function: CalledFunction


class ChatMessage(Answer):
    role: Literal["assistant"]
    content: str | None
    reasoning_content: str = ""
    tool_calls: list[CalledTool] = []


class ChatChoice(Ended):
    index: Count
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: Finish


class ChatAnswer(Answer):
    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage


class FunctionDelta(Answer):
    name: str = ""
    arguments: str = ""


class ToolDelta(Answer):
    index: Count
    id: str = ""
    type: Literal["function"] = "function"
    function: FunctionDelta = FunctionDelta()


class ChatDelta(Answer):
    role: Literal["assistant"] = "assistant"
    content: str | None = None
    reasoning_content: str = ""
    tool_calls: list[ToolDelta] = []


class ChatChunkChoice(Ended):
    index: Count
    delta: ChatDelta
    logprobs: ChatLogprobs | None
    finish_reason: Finish | None


class ChatChunk(Answer):
    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: Usage | None = None


class ModelCard(Answer):
    """max_model_len: tokens of prompt and answer together."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str
    parent: None
    max_model_len: int


class ModelList(Answer):
    object: Literal["list"]
    data: list[ModelCard]


class Tokens(Answer):
    """token_strs: the text of each token, when asked for."""

    count: Count
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


class Text(Answer):
    prompt: str


class Ready(Answer):
    status: Literal["ready"]
    model: str


class EngineLoad(Answer):
    running: Count
    waiting: Count


class Load(Answer):
    """server_load: requests under way in this front door, uploads and those that are `queued` for
    their turn included."""

    server_load: Count
    streams: Count
    queued: Count
    engines: dict[str, EngineLoad]


class Version(Answer):
    version: str


class DashboardData(BaseModel):
    """What the page at /dashboard draws; for nobody else."""

    model_config = ConfigDict(extra="allow")
    __pydantic_extra__: dict[str, Any]


class Mesh(BaseModel):
    """What the mesh's keeper answers; grows with it."""

    model_config = ConfigDict(extra="allow")
    __pydantic_extra__: dict[str, Any]
