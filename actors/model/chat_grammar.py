"""What a constrained chat answer of K3's format may be: its elements around what is asked for.

Reasoning is free: any token but the markers of the structure. The response is free, or what a
response format or structured output allows; with a forced call it is empty. Calls name declared
tools. The grammar ends where the message does, so that the model's end id can come nowhere else.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from expertmesh.actors.constraint.grammars import compose, literal, part_of
from expertmesh.actors.constraint.spec import Constraint, ConstraintError
from expertmesh.actors.model import chat_xtml
from expertmesh.actors.model.chat_messages import ChatError, compact_json
from expertmesh.actors.model.chat_tool_grammar import (
    OPEN,
    SEP,
    Rules,
    any_arguments,
    end,
    tag,
    typed_arguments,
)
from expertmesh.actors.model.tokenizer import Tokenizer

_COMMON = (
    "TEXT: /(?s:.*)/",
    r'KEY: /[^"<>=\x00-\x1f]{1,64}/',
    'TYPE: "string" | "number" | "boolean" | "null" | "object" | "array"',
)


@dataclass(frozen=True, slots=True)
class Tool:
    """A declared function. path: where in the request, for error messages."""

    path: str
    function: dict[str, Any]

    @property
    def name(self) -> str:
        return str(self.function["name"])

    @property
    def schema_path(self) -> str:
        return f"{self.path}.function.parameters"

    @property
    def strict(self) -> bool:
        return self.function.get("strict") is True


@dataclass(frozen=True, slots=True)
class Form:
    """What a request asks of the answer's form.

    body: of the response. tools: all that are declared. choice: None (auto), "none", "required" or
    `function:NAME`. parallel: whether there may be more than one call.
    """

    body: Constraint | None
    tools: Sequence[Tool]
    choice: str | None
    parallel: bool

    @property
    def callable(self) -> Sequence[Tool]:
        """The tools a call of this answer may name. Of one name the last declaration counts."""
        if self.choice == "none":
            return ()
        _, _, name = (self.choice or "").partition(":")
        tools = {tool.name: tool for tool in self.tools if name in ("", tool.name)}
        return list(tools.values())

    @property
    def single(self) -> bool:
        """At most one call; a named function is called once."""
        return not self.parallel or (self.choice or "").startswith("function:")

    @property
    def forced(self) -> bool:
        return self.choice not in (None, "none")

    @property
    def typed(self) -> bool:
        """Whether every call keeps to its tool's schema."""
        return all(self.follows_schema(tool) for tool in self.callable)

    def follows_schema(self, tool: Tool) -> bool:
        """Whether calls of this tool keep to its schema."""
        return self.forced or tool.strict


def constraint_of(form: Form, thinking: bool, tokenizer: Tokenizer) -> Constraint | None:
    """The grammar of the whole answer after K3's generation prompt; None where it is free.

    Raises ConstraintError, and ChatError for a tool's schema.
    """
    tools = form.callable
    limited = bool(tools) and form.single
    if not (form.body or form.forced or limited or any(tool.strict for tool in tools)):
        return None
    rules = Rules()
    rules.add("free", f"<[^{_markers(tokenizer)}]>*")
    head = f"free {end('think')} {tag('response')} " if thinking else ""
    close, calls = end("response"), ""
    if tools:
        _calls(rules, form)
        calls = "calls" if form.forced else "calls?"
    content = "free"
    if form.body is not None:
        content, rules.parts["body"] = "@body", part_of(form.body)
    if form.forced:
        answer = f"{close} {calls}"
    elif form.body is not None and tools:
        answer = f"({content} {close} | {close} calls)"  # an answer in the format, or calls
    else:
        answer = f"{content} {close} {calls}"
    start = f"start: {head}{answer} {end('message')}"
    text = "\n".join([start, *_COMMON, *rules.lines])
    field = form.body.field if form.body is not None else "tools"
    composed = compose(text, **rules.parts)
    return Constraint(composed.kind, composed.text, field)


def schemas_of(form: Form) -> list[Constraint]:
    """The schemas within the grammar, each with the request's field it came from: compiled alone,
    they tell whose mistake it is."""
    found = [] if form.body is None else [form.body]
    for tool in form.callable:
        schema = tool.function.get("parameters")
        if schema is not None and form.follows_schema(tool):
            field = tool.schema_path
            found.append(Constraint("json_schema", compact_json(schema, field), field))
    return found


def _markers(tokenizer: Tokenizer) -> str:
    names = (chat_xtml.OPEN, chat_xtml.CLOSE, chat_xtml.SEP, chat_xtml.END)
    return ",".join(str(tokenizer.special_id(name)) for name in names)


def _calls(rules: Rules, form: Form) -> None:
    index = '"1"' if form.single else "INDEX"
    rules.lines.append("INDEX: /[1-9][0-9]{0,2}/")
    names = []
    for number, tool in enumerate(form.callable):
        name = f"tool_{number}"
        if form.follows_schema(tool):
            try:
                typed_arguments(rules, f"{name}_arguments", tool.function.get("parameters"))
            except ConstraintError as error:
                raise ChatError(tool.schema_path, str(error)) from None
        else:
            any_arguments(rules, f"{name}_arguments")
        opening = literal(f'call tool="{chat_xtml.escape(tool.name)}" index="')
        head = f'{OPEN} {opening} {index} "\\"" {SEP}'
        rules.add(name, f"{head} {name}_arguments {end('call')}")
        names.append(name)
    many = "" if form.single else "+"
    rules.add("calls", f"{tag('tools')} ({' | '.join(names)}){many} {end('tools')}")
