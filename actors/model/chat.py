"""Chat: OpenAI messages to prompt ids, and generated ids back to an answer.

The format follows the special tokens that the tokenizer names, not the model's family: a K3-layout
checkpoint with a foreign tokenizer must fail with a clear error, not with a garbled prompt.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from expertmesh.actors.constraint.spec import Constraint, ConstraintError
from expertmesh.actors.model import chat_im, chat_xtml
from expertmesh.actors.model.chat_calls import CallDelta
from expertmesh.actors.model.chat_grammar import Form, Tool, constraint_of, schemas_of
from expertmesh.actors.model.chat_messages import (
    ChatError,
    Message,
    parse_messages,
    parse_response_format,
    parse_tool_choice,
    parse_tools,
)
from expertmesh.actors.model.chat_parser import ChatDelta, ChatParser
from expertmesh.actors.model.chat_xtml import EFFORTS
from expertmesh.actors.model.tokenizer import Tokenizer

__all__ = [
    "EFFORTS", "CallDelta", "ChatDelta", "ChatError", "ChatParser", "ChatTurn", "prepare_chat",
    "render_chat",
]  # fmt: skip


@dataclass(frozen=True, slots=True)
class ChatTurn:
    """An assistant's turn that is about to be generated.

    constraint: of all its tokens, None where it is free. schemas: what the request contributed to
    it, piece by piece, each with its field. typed: whether calls keep to their tools' schemas.
    """

    prompt_ids: list[int]
    constraint: Constraint | None = None
    schemas: list[Constraint] = field(default_factory=list)
    typed: bool = False


@dataclass(frozen=True, slots=True)
class _Request:
    """A request's checked values. declared: of its tools those that are no message's."""

    messages: list[Message]
    declared: tuple[dict[str, Any], ...]
    wanted: tuple[str, Any] | None
    form: Form


def render_chat(
    messages: Any,
    tools: Any,
    thinking: str | None,
    tool_choice: Any,
    tokenizer: Tokenizer,
    *,
    response_format: Any = None,
    add_generation_prompt: bool = True,
) -> list[int]:
    """The prompt ids alone of `prepare_chat`.

    Args:
        add_generation_prompt: end with the opening of the assistant's turn.
    """
    request = _read(messages, tools, tool_choice, response_format)
    return _render(request, thinking, tokenizer, add_generation_prompt)


def prepare_chat(
    messages: Any,
    tools: Any,
    thinking: str | None,
    tool_choice: Any,
    tokenizer: Tokenizer,
    *,
    response_format: Any = None,
    body: Constraint | None = None,
    parallel: bool = True,
) -> ChatTurn:
    """The prompt of a chat request, and the form of its answer.

    Args:
        messages, tools, tool_choice, response_format: the request's values as JSON data (None =
            not given). All checks of their contents happen here.
        thinking: effort "low", "high" or "max"; None turns thinking off.
        body: what the response may be. response_format only tells the model.
        parallel: whether there may be more than one call.

    Raises:
        ChatError: a value is wrong (`param` is its path) or this checkpoint cannot express it.
    """
    request = _read(messages, tools, tool_choice, response_format, body, parallel)
    prompt_ids = _render(request, thinking, tokenizer, True)
    form = request.form
    if not chat_xtml.has_markers(tokenizer):
        return ChatTurn(prompt_ids, body, schemas_of(form))  # the answer is the response
    try:
        constraint = constraint_of(form, thinking is not None, tokenizer)
    except ConstraintError as error:
        raise ChatError("tools" if body is None else body.field, str(error)) from None
    if constraint is None:
        return ChatTurn(prompt_ids)
    return ChatTurn(prompt_ids, constraint, schemas_of(form), form.typed)


def _read(
    messages: Any,
    tools: Any,
    tool_choice: Any,
    response_format: Any,
    body: Constraint | None = None,
    parallel: bool = True,
) -> _Request:
    parsed = parse_messages(messages)
    declared = parse_tools(tools)
    everything = list(_tools(declared, "tools"))
    for message in parsed:
        everything += _tools(message.tools, f"{message.path}.tools")
    choice = parse_tool_choice(tool_choice, [tool.name for tool in everything])
    form = Form(body, everything, choice, parallel)
    return _Request(parsed, declared, parse_response_format(response_format), form)


def _tools(declared: tuple[dict[str, Any], ...], path: str) -> Iterator[Tool]:
    for number, tool in enumerate(declared):
        yield Tool(f"{path}[{number}]", tool["function"])


def _render(
    request: _Request, thinking: str | None, tokenizer: Tokenizer, add_generation_prompt: bool
) -> list[int]:
    messages, declared, choice = request.messages, request.declared, request.form.choice
    if chat_xtml.has_markers(tokenizer):
        return chat_xtml.render(
            messages, declared, thinking, choice, request.wanted, tokenizer, add_generation_prompt
        )
    if not chat_im.has_markers(tokenizer):
        names = (chat_xtml.OPEN, chat_xtml.CLOSE, chat_xtml.SEP, chat_xtml.END)
        missing = [name for name in names if tokenizer.special_id(name) is None]
        raise ChatError(
            "messages",
            f"this checkpoint has no chat format: its tokenizer does not name {', '.join(missing)}",
        )
    if declared:
        raise ChatError("tools", "this checkpoint's chat format does not support it")
    return chat_im.render(messages, tokenizer, add_generation_prompt)
