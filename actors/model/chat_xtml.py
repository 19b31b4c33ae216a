"""Kimi K3's XTML chat format (k3-model.md 4.2), rendered straight to token ids.

A tag is `<|open|>NAME key="value"<|sep|>` or `<|close|>NAME<|sep|>`. The markers are emitted as
ids; every other piece is encoded alone and as literal text. So user text that spells a marker stays
text, and the pieces never merge into tokens across their borders: both decide the prompt's ids.

Where the specification is silent: a named tool choice renders as `tool_choice=specified`; a system
message with tools and content renders both, the declaration first; tool results count from 1 after
each assistant message; results whose ids do not all match that message's calls keep their order
and take the call's name by position.
"""

from typing import Any

from expertmesh.actors.model.chat_messages import Call, ChatError, Message, compact_json
from expertmesh.actors.model.tokenizer import Tokenizer

OPEN, CLOSE, SEP, END = "<|open|>", "<|close|>", "<|sep|>", "<|end_of_msg|>"
EFFORTS = ("low", "high", "max")

# Wording of the published format; the model was trained on it to the letter. "medium" is named
# although it cannot be asked for.
EFFORT_BODY = (
    "`thinking_effort` guides on how much to think in your thinking channel (not including the "
    "response channel), supported values include `low`, `medium`, `high`, and `max`.\n"
    "Now the system is invoked with `thinking_effort={}`."
)
TOOLS_BODY = "# Tools\nHere are the available tools, described in JSONSchema.\n\n```json\n{}\n```"
NEW_TOOLS_BODY = (
    "## New Tools Available\nThe system dynamically extends the toolset via lazy-loading.\n"
    "You have access to all existing and extended tools.\n"
    "Here are the specs for the extended tools.\n\n```json\n{}\n```"
)
CHOICE_BODIES = {
    "required": (
        "The system is invoked with `tool_choice=required`.\n"
        "You MUST call tools in the next message."
    ),
    "none": (
        "The system is invoked with `tool_choice=none`.\n"
        "You MUST NOT call any tools in the next message."
    ),
    "function": (
        "The system is invoked with `tool_choice=specified`.\n"
        "You MUST call the tool `{}` in the next message."
    ),
}
RAW_JSON = (
    "Your response must be raw JSON data without markdown code blocks (```json) or any additional "
    "formatting."
)
FORMAT_BODIES = {
    "json_object": f"The system is invoked with `response_format=json_object`.\n{RAW_JSON}",
    "json_schema": (
        f"The system is invoked with `response_format=json_schema`.\n{RAW_JSON}\n"
        "The JSON data must match the following schema:\n```json\n{}\n```"
    ),
}


def has_markers(tokenizer: Tokenizer) -> bool:
    """Whether the tokenizer names K3's four structural ids."""
    return all(tokenizer.special_id(name) is not None for name in (OPEN, CLOSE, SEP, END))


def escape(value: str) -> str:
    """Attribute text. `&` first, or the quotes' own `&` would be escaped again."""
    return value.replace("&", "&amp;").replace('"', "&quot;")


def unescape(value: str) -> str:
    """The reverse of `escape`."""
    return value.replace("&quot;", '"').replace("&amp;", "&")


class Writer:
    """Appends tags and text to a list of ids."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.ids: list[int] = []
        self._tokenizer = tokenizer

    def open(self, tag: str, **attributes: str) -> None:
        self._marker(OPEN)
        self.text(tag)
        for key, value in attributes.items():
            for piece in (f" {key}", '="', escape(value), '"'):
                self.text(piece)
        self._marker(SEP)

    def close(self, tag: str) -> None:
        self._marker(CLOSE)
        self.text(tag)
        self._marker(SEP)

    def element(self, tag: str, body: str, **attributes: str) -> None:
        self.open(tag, **attributes)
        self.text(body)
        self.close(tag)

    def message(self, body: str, **attributes: str) -> None:
        self.element("message", body, **attributes)
        self._marker(END)

    def end_message(self) -> None:
        self.close("message")
        self._marker(END)

    def text(self, text: str) -> None:
        self.ids += self._tokenizer.encode(text)

    def _marker(self, name: str) -> None:
        token_id = self._tokenizer.special_id(name)
        assert token_id is not None, "render checks has_markers first"
        self.ids.append(token_id)


def render(
    messages: list[Message],
    tools: tuple[dict[str, Any], ...],
    effort: str | None,
    choice: str | None,
    response_format: tuple[str, Any] | None,
    tokenizer: Tokenizer,
    add_generation_prompt: bool,
) -> list[int]:
    """Prompt ids for checked values (see chat_messages).

    Args:
        effort: thinking effort, None for thinking off.
        choice: None, "none", "required" or `function:NAME`.

    Raises:
        ChatError: unknown effort, or a tool result that belongs to no call.
    """
    if effort is not None and effort not in EFFORTS:
        raise ChatError("thinking_effort", f"must be one of {', '.join(EFFORTS)}")
    out = Writer(tokenizer)
    if tools:
        out.message(TOOLS_BODY.format(compact_json(tools, "tools")), **_internal("tool-declare"))
    if effort is not None:
        out.message(EFFORT_BODY.format(effort), **_internal("thinking-effort"))
    _history(out, messages, thinking=effort is not None)
    if choice is not None:
        kind, _, name = choice.partition(":")
        out.message(CHOICE_BODIES[kind].replace("{}", name), **_internal("tool-choice"))
    if response_format is not None:
        kind, schema = response_format
        text = compact_json(schema, "response_format.json_schema.schema")
        out.message(FORMAT_BODIES[kind].replace("{}", text), **_internal("response-format"))
    if add_generation_prompt:
        out.open("message", role="assistant")
        out.open("response" if effort is None else "think")
    return out.ids


def _internal(kind: str) -> dict[str, str]:
    return {"role": "system", "type": kind}


def _named(message: Message) -> dict[str, str]:
    return {"role": message.role} | ({"name": message.name} if message.name else {})


def _history(out: Writer, messages: list[Message], thinking: bool) -> None:
    calls: tuple[Call, ...] = ()
    answered = 0
    run: list[Message] = []  # consecutive tool results, not yet written
    for message in messages:
        if message.role == "tool":
            run.append(message)
            continue
        answered = _results(out, run, calls, answered)
        run = []
        if message.role == "assistant":
            calls, answered = message.calls, 0
            _assistant(out, message, thinking)
            continue
        if message.tools:
            text = compact_json(message.tools, f"{message.path}.tools")
            out.message(NEW_TOOLS_BODY.replace("{}", text), **_internal("tool-declare"))
        if message.text is not None and not (message.tools and not message.text):
            out.message(message.text, **_named(message))
    _results(out, run, calls, answered)


def _assistant(out: Writer, message: Message, thinking: bool) -> None:
    out.open("message", **_named(message))
    if thinking:  # structural: present even when empty, in every past turn
        out.element("think", message.reasoning)
    out.element("response", message.text or "")
    if message.calls:
        out.open("tools")
        for index, call in enumerate(message.calls, start=1):
            out.open("call", tool=call.name, index=str(index))
            if isinstance(call.arguments, str):
                out.element("json", call.arguments, type="object")
            else:
                for argument in call.arguments:
                    out.element("argument", argument.text, key=argument.key, type=argument.type)
            out.close("call")
        out.close("tools")
    out.end_message()


def _results(out: Writer, run: list[Message], calls: tuple[Call, ...], answered: int) -> int:
    """Write consecutive tool results in call order; returns the new count of answered calls."""
    places: dict[str | None, int] = {}
    for place, call in enumerate(calls):
        if call.id is not None:
            places.setdefault(call.id, place)
    matched = [(places.get(message.tool_call_id), message) for message in run]
    if all(place is not None for place, _ in matched):
        matched.sort(key=lambda pair: pair[0] or 0)  # stable: doubled ids keep their order
    for index, (found, message) in enumerate(matched, start=answered):
        name = message.name or (calls[index].name if index < len(calls) else "")
        if found is not None:
            name = calls[found].name
        if not name:
            raise ChatError(
                f"{message.path}.tool_call_id",
                "no call of the assistant message before has this id",
            )
        out.message(message.text or "", role="tool", tool=name, index=str(index + 1))
    return answered + len(run)
