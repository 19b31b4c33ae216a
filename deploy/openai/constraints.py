"""Constrained answers: what a request asks for, and whether it can be compiled at all.

A grammar that cannot be compiled is the client's mistake and has to be found here, in bounded time:
an engine takes what this door lets in.
"""

import asyncio
import threading
from collections.abc import Sequence
from typing import Any
from weakref import WeakKeyDictionary

import orjson

from expertmesh.actors.constraint.grammars import check_length
from expertmesh.actors.constraint.spec import Constraint, ConstraintError, Kind
from expertmesh.actors.constraint.trial import Trials, TrialUnavailable
from expertmesh.actors.constraint.vocabulary import vocabulary_of
from expertmesh.actors.model.tokenizer import Tokenizer
from expertmesh.deploy.openai.errors import ApiError, bad, unavailable
from expertmesh.deploy.openai.protocol import ResponseFormat, SamplingRequest, StructuredOutputs
from expertmesh.deploy.openai.served import ServedModel

# A verdict that does not come within this time is not the grammar's fault but the queue's.
PATIENCE_S = 30.0

_trials: WeakKeyDictionary[Tokenizer, Trials] = WeakKeyDictionary()
_lock = threading.Lock()


def asked(request: SamplingRequest, served: ServedModel) -> Constraint | None:
    """What the text (of a chat: the response) may be; None: anything. Raises ApiError."""
    wanted, other = request.response_format, request.structured_outputs
    constraint = None if wanted is None else _of_format(wanted)
    if other is not None:
        if constraint is not None:
            raise bad("give either response_format or structured_outputs", "structured_outputs")
        constraint = _of_structure(other)
    if constraint is None:
        return None
    if served.tokenizer is None:
        raise bad(
            "this checkpoint has no tokenizer, so its output cannot be constrained",
            constraint.field.split(".")[0],
        )
    try:
        check_length(constraint.text)
    except ConstraintError as error:
        raise _refusal(constraint, str(error)) from None
    return constraint


def _of_format(wanted: ResponseFormat) -> Constraint | None:
    if wanted.type == "text":
        return None
    if wanted.type == "json_object":
        return Constraint("json_schema", '{"type":"object"}', "response_format")
    if wanted.type != "json_schema":
        raise bad(
            "response_format.type must be text, json_object or json_schema",
            "response_format.type",
        )
    holder, field = wanted.json_schema, "response_format.json_schema"
    if not isinstance(holder, dict):
        raise bad(f"'{field}' must be an object with a name and a schema", field)
    unknown = holder.keys() - {"name", "description", "schema", "strict"}
    if unknown:
        field = f"{field}.{min(unknown)}"
        raise bad(f"unknown field '{field[:200]}'", field, "unknown_parameter")
    for key, kind in (("name", str), ("description", str), ("strict", bool)):
        if holder.get(key) is not None and not isinstance(holder[key], kind):
            what = "a string" if kind is str else "true or false"
            raise bad(f"'{field}.{key}' must be {what}", f"{field}.{key}")
    schema = holder.get("schema")
    if not isinstance(schema, dict | bool):
        raise bad(f"'{field}.schema' must be a JSON schema", f"{field}.schema")
    return _schema(schema, f"{field}.schema")


def _of_structure(wanted: StructuredOutputs) -> Constraint:
    given = {name: value for name, value in wanted.given().items() if value is not None}
    if len(given) != 1:
        names = ", ".join(wanted.given())
        raise bad(f"structured_outputs needs exactly one of {names}", "structured_outputs")
    ((name, value),) = given.items()
    field = f"structured_outputs.{name}"
    if name == "json_object":
        if value is not True:
            raise bad(f"'{field}' must be true", field)
        return Constraint("json_schema", '{"type":"object"}', field)
    if name == "json":
        return _json(value, field)
    if name == "choice":
        if not value:
            raise bad(f"'{field}' must not be empty", field)
        return Constraint("choice", orjson.dumps(value).decode(), field)
    kind: Kind = "regex" if name == "regex" else "grammar"
    return Constraint(kind, value, field)


def _json(value: Any, field: str) -> Constraint:
    """A schema, or its JSON text as in vLLM."""
    if isinstance(value, str):
        try:
            value = orjson.loads(value)
        except orjson.JSONDecodeError as error:
            raise bad(f"'{field}' is not valid JSON: {error}", field) from None
    if not isinstance(value, dict | bool):
        raise bad(f"'{field}' must be a JSON schema", field)
    return _schema(value, field)


def _schema(schema: Any, field: str) -> Constraint:
    try:
        text = orjson.dumps(schema).decode()
    except orjson.JSONEncodeError:  # text within the request's JSON may nest deeper than that
        raise bad(f"'{field}' nests too deeply", field) from None
    return Constraint("json_schema", text, field)


def _refusal(constraint: Constraint, reason: str) -> ApiError:
    return bad(f"'{constraint.field}': {reason}", constraint.field)


async def admit(constraints: Sequence[Constraint], served: ServedModel) -> None:
    """Compiles each in a process beside this one. Every door calls it with a generation's
    `grammars` after it was prepared.

    Raises ApiError 400 naming the field of the first that does not compile, 503 when no verdict
    could be had.
    """
    if not constraints or served.tokenizer is None:
        return
    trials = _trials_of(served.tokenizer, served.eos)
    loop = asyncio.get_running_loop()
    try:
        async with asyncio.timeout(PATIENCE_S):
            for constraint in constraints:
                verdict = trials.known(constraint)
                if verdict is None:
                    verdict = await loop.run_in_executor(trials.threads, trials.verdict, constraint)
                if verdict:
                    raise _refusal(constraint, verdict)
    except TimeoutError:
        raise unavailable("too many grammars wait to be compiled") from None
    except TrialUnavailable as error:
        raise unavailable(str(error)) from None


def _trials_of(tokenizer: Tokenizer, eos: Sequence[int]) -> Trials:
    with _lock:
        if tokenizer not in _trials:
            _trials[tokenizer] = Trials(vocabulary_of(tokenizer, eos))
        return _trials[tokenizer]
