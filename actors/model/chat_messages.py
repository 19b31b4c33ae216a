"""A chat request's JSON, checked into typed values. Knows no template and no tokenizer.

Every refusal is a ChatError whose `param` is the path of the first bad value, as in
`messages[2].content[0]`. Input is echoed only as a short quote: error bodies stay small.

Rules where OpenAI's documents are silent:
- Text parts of one message are joined without a separator, and are then tokenised as one string:
  a request with parts is token for token the request with the joined string.
- `null` means "not given" everywhere.
- Unknown members of a message are refused when they hold something, except the answer metadata
  that clients replay (`refusal`, `annotations`, ...), which is ignored.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from expertmesh.actors.model.chat_arguments import Argument, split_object

ROLES = ("system", "developer", "user", "assistant", "tool")
TEXT_PARTS = ("text", "input_text", "output_text")
_FIELDS = {
    "role", "content", "name", "tools", "tool_calls", "tool_call_id",
    "reasoning_content", "reasoning",
}  # fmt: skip
_REPLAYED = {
    "refusal", "annotations", "audio", "id", "index", "status", "created",
    "provider_specific_fields", "reasoning_details", "thinking_blocks",
}  # fmt: skip


class ChatError(ValueError):
    """A chat request that cannot be rendered. `str()` names the path and the reason."""

    def __init__(self, param: str, reason: str) -> None:
        # Half surrogate pairs in a key must not reach the response's encoder.
        self.param = param.encode("utf-8", "replace").decode()
        self.message = f"{self.param}: {reason}"
        super().__init__(self.message)


@dataclass(frozen=True, slots=True)
class Call:
    """One tool call of the history. `arguments` is raw text when it is not a JSON object."""

    id: str | None
    name: str
    arguments: list[Argument] | str


@dataclass(frozen=True, slots=True)
class Message:
    """One message. `text` is None when no content was given; `path` is for error messages."""

    path: str
    role: str
    text: str | None
    name: str = ""
    reasoning: str = ""
    tools: tuple[dict[str, Any], ...] = ()
    calls: tuple[Call, ...] = ()
    tool_call_id: str | None = None


def quote(value: Any) -> str:
    """A bounded quote of user input. Containers are named, not printed."""
    if isinstance(value, (dict, list)):
        return "an object" if isinstance(value, dict) else "an array"
    text = json.dumps(value)
    return text if len(text) <= 60 else text[:57] + "..."


def parse_messages(messages: Any) -> list[Message]:
    """Check `messages`: a non-empty array of message objects.

    Raises:
        ChatError: at the first value that is wrong.
    """
    if not isinstance(messages, list) or not messages:
        raise ChatError("messages", "must be a non-empty array")
    return [_message(f"messages[{i}]", message) for i, message in enumerate(messages)]


def _message(path: str, message: Any) -> Message:
    if not isinstance(message, dict):
        raise ChatError(path, f"must be an object, got {quote(message)}")
    role = message.get("role")
    if role not in ROLES:
        raise ChatError(f"{path}.role", f"must be one of {', '.join(ROLES)}; got {quote(role)}")
    for key, value in message.items():
        if value and key not in _FIELDS and key not in _REPLAYED:
            raise ChatError(f"{path}.{key[:60]}", "unknown field")
    is_system = role in ("system", "developer")
    tools = parse_tools(message.get("tools"), f"{path}.tools")
    if tools and not is_system:
        raise ChatError(f"{path}.tools", f"only a system message can declare tools, not {role}")
    if message.get("tool_calls") and role != "assistant":
        raise ChatError(f"{path}.tool_calls", f"only an assistant message has calls, not {role}")
    calls = _calls(message.get("tool_calls"), f"{path}.tool_calls")
    reasoning = (
        _string(message, path, "reasoning_content") or _string(message, path, "reasoning")
        if role == "assistant"
        else ""
    )
    text = _content(message.get("content"), f"{path}.content")
    if text is None and not (tools or calls or reasoning):
        article = "an" if role == "assistant" else "a"
        raise ChatError(f"{path}.content", f"{article} {role} message needs content")
    return Message(
        path=path,
        role="system" if is_system else role,
        text=text,
        name=_string(message, path, "name"),
        reasoning=reasoning,
        tools=tools,
        calls=calls,
        tool_call_id=_string(message, path, "tool_call_id") or None,
    )


def _string(owner: dict[str, Any], path: str, key: str) -> str:
    """An optional string member; "" when absent or null."""
    value = owner.get(key)
    if value is None:
        return ""
    if not isinstance(value, str):
        raise ChatError(f"{path}.{key}", f"must be a string, got {quote(value)}")
    return value


def _content(content: Any, path: str) -> str | None:
    if content is None or isinstance(content, str):
        return content
    if not isinstance(content, list) or not content:
        raise ChatError(path, "must be a string or a non-empty array of text parts")
    return "".join([_part(part, f"{path}[{j}]") for j, part in enumerate(content)])


def _part(part: Any, path: str) -> str:
    if not isinstance(part, dict):
        raise ChatError(path, f"must be an object, got {quote(part)}")
    kind = part.get("type")
    if kind not in TEXT_PARTS:
        reason = f'this model reads text only: type must be "text", got {quote(kind)}'
        raise ChatError(path, reason)
    text = part.get("text")
    if not isinstance(text, str):
        raise ChatError(f"{path}.text", f"must be a string, got {quote(text)}")
    return text


def _calls(calls: Any, path: str) -> tuple[Call, ...]:
    if calls is None:
        return ()
    if not isinstance(calls, list):
        raise ChatError(path, "must be an array")
    return tuple([_call(call, f"{path}[{j}]") for j, call in enumerate(calls)])


def _call(call: Any, path: str) -> Call:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict):
        raise ChatError(f"{path}.function", "must be an object with a name and arguments")
    if call.get("type") not in (None, "function"):
        raise ChatError(f"{path}.type", f'must be "function", got {quote(call["type"])}')
    name = _string(function, f"{path}.function", "name")
    if not name:
        raise ChatError(f"{path}.function.name", "must be a non-empty string")
    arguments = function.get("arguments")
    where = f"{path}.function.arguments"
    if isinstance(arguments, dict):
        arguments = compact_json(arguments, where, separators=(", ", ": "), sort=False)
    if arguments is not None and not isinstance(arguments, str):
        raise ChatError(where, f"must be a JSON text or an object, got {quote(arguments)}")
    members = split_object(arguments) if arguments and arguments.strip() else []
    return Call(
        id=_string(call, path, "id") or None,
        name=name,
        arguments=members if members is not None else arguments or "",
    )


def parse_tools(tools: Any, path: str = "tools") -> tuple[dict[str, Any], ...]:
    """Check a tool list; null members of a tool are dropped, the rest stays as it came."""
    if tools is None:
        return ()
    if not isinstance(tools, list):
        raise ChatError(path, f"must be an array, got {quote(tools)}")
    checked = tuple([_tool(tool, f"{path}[{i}]") for i, tool in enumerate(tools)])
    names: set[str] = set()
    for i, tool in enumerate(checked):
        name = tool["function"]["name"]
        if name in names:
            raise ChatError(f"{path}[{i}].function.name", f"{quote(name)} is there twice")
        names.add(name)
    return checked


def _tool(tool: Any, path: str) -> dict[str, Any]:
    if not isinstance(tool, dict):
        raise ChatError(path, f"must be an object, got {quote(tool)}")
    if tool.get("type") != "function":
        raise ChatError(f"{path}.type", f'must be "function", got {quote(tool.get("type"))}')
    function = tool.get("function")
    if not isinstance(function, dict):
        raise ChatError(f"{path}.function", "must be an object")
    where = f"{path}.function"
    if not 0 < len(_string(function, where, "name")) <= 256:
        raise ChatError(f"{where}.name", "must be a string of 1 to 256 characters")
    _string(function, where, "description")
    parameters = function.get("parameters")
    if parameters is not None and not isinstance(parameters, dict):
        raise ChatError(f"{where}.parameters", "must be a JSON schema object")
    if parameters and isinstance(kind := parameters.get("type"), str) and kind != "object":
        raise ChatError(f"{where}.parameters.type", f'must be "object", got {quote(kind)}')
    if function.get("strict") not in (None, True, False):
        raise ChatError(f"{where}.strict", "must be true or false")
    kept = {key: value for key, value in function.items() if value is not None}
    return {key: value for key, value in tool.items() if value is not None} | {"function": kept}


def parse_tool_choice(choice: Any, tools: Sequence[str]) -> str | None:
    """What the prompt must say about tools: None (auto), "none", "required" or `function:NAME`.

    Args:
        tools: the name of every declared tool, those of system messages included.
    """
    if choice is None or choice == "none":
        # Without tools, "none" is true by itself; clients send it as a default.
        return "none" if choice and tools else None
    function = choice.get("function") if isinstance(choice, dict) else None
    name = function.get("name") if isinstance(function, dict) else None
    named = isinstance(name, str) and bool(name) and choice.get("type") == "function"
    if not named and choice not in ("auto", "required"):
        raise ChatError(
            "tool_choice",
            'must be "none", "auto", "required" or {"type": "function", "function": {"name": ...}}',
        )
    if not tools:
        raise ChatError("tool_choice", "needs tools in the request")
    if not named:
        return None if choice == "auto" else "required"
    if name not in tools:
        raise ChatError("tool_choice.function.name", f"no tool is named {quote(name)}")
    return f"function:{name}"


def parse_response_format(value: Any) -> tuple[str, Any] | None:
    """`response_format` as (type, schema); None for text. The schema is not compiled here."""
    if value is None:
        return None
    kind = value.get("type") if isinstance(value, dict) else None
    if kind == "text":
        return None
    if kind == "json_object":
        return "json_object", None
    if kind != "json_schema":
        raise ChatError(
            "response_format.type", f"must be text, json_object or json_schema; got {quote(kind)}"
        )
    holder = value.get("json_schema")
    schema = holder.get("schema") if isinstance(holder, dict) else None
    if not isinstance(schema, (dict, bool)):
        raise ChatError("response_format.json_schema.schema", "must be a JSON schema")
    return "json_schema", schema


def compact_json(
    value: Any, path: str, separators: tuple[str, str] = (",", ":"), sort: bool = True
) -> str:
    """Non-ASCII kept, keys sorted recursively; values that are not JSON are a ChatError."""
    try:
        return json.dumps(
            value, ensure_ascii=False, separators=separators, sort_keys=sort, allow_nan=False
        )
    except RecursionError:
        raise ChatError(path, "is nested too deeply") from None
    except (TypeError, ValueError) as error:
        raise ChatError(path, f"is not JSON: {error}") from None
