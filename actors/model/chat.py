"""Chat: OpenAI messages to prompt ids, and generated ids back to an answer.

The format follows the special tokens that the tokenizer names, not the model's family: a K3-layout
checkpoint with a foreign tokenizer must fail with a clear error, not with a garbled prompt.
"""

from typing import Any

from expertmesh.actors.model import chat_im, chat_xtml
from expertmesh.actors.model.chat_messages import (
    ChatError,
    parse_messages,
    parse_response_format,
    parse_tool_choice,
    parse_tools,
)
from expertmesh.actors.model.chat_parser import ChatDelta, ChatParser, ToolCall
from expertmesh.actors.model.chat_xtml import EFFORTS
from expertmesh.actors.model.tokenizer import Tokenizer

__all__ = ["EFFORTS", "ChatDelta", "ChatError", "ChatParser", "ToolCall", "render_chat"]


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
    """Prompt ids of a chat request.

    Args:
        messages, tools, tool_choice, response_format: the request's values as JSON data (None =
            not given). All checks of their contents happen here.
        thinking: effort "low", "high" or "max"; None turns thinking off.
        add_generation_prompt: end with the opening of the assistant's turn.

    Raises:
        ChatError: a value is wrong (`param` is its path) or this checkpoint cannot express it.
    """
    parsed = parse_messages(messages)
    declared = parse_tools(tools)
    everything = declared + tuple(tool for message in parsed for tool in message.tools)
    choice = parse_tool_choice(tool_choice, everything)
    wanted = parse_response_format(response_format)
    if chat_xtml.has_markers(tokenizer):
        return chat_xtml.render(
            parsed, declared, thinking, choice, wanted, tokenizer, add_generation_prompt
        )
    if not chat_im.has_markers(tokenizer):
        names = (chat_xtml.OPEN, chat_xtml.CLOSE, chat_xtml.SEP, chat_xtml.END)
        missing = [name for name in names if tokenizer.special_id(name) is None]
        raise ChatError(
            "messages",
            f"this checkpoint has no chat format: its tokenizer does not name {', '.join(missing)}",
        )
    for param, value in (("tools", declared), ("response_format", wanted)):
        if value:
            raise ChatError(param, "this checkpoint's chat format does not support it")
    return chat_im.render(parsed, tokenizer, add_generation_prompt)
