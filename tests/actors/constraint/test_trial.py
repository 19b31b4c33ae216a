"""Grammars from outside are tried in another process: verdicts, crashes, time limits."""

import json
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from expertmesh.actors.constraint import trial
from expertmesh.actors.constraint.spec import MAX_TEXT, Constraint
from expertmesh.actors.constraint.trial import CRASHED, Trials, TrialUnavailable
from expertmesh.actors.constraint.vocabulary import vocabulary_of
from tests.support.chat import load_tokenizer


@pytest.fixture(scope="module")
def trials(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Trials]:
    tokenizer = load_tokenizer(tmp_path_factory.mktemp("k3"))
    yield Trials(vocabulary_of(tokenizer), limit_s=30.0)


def chain(length: int) -> str:
    """A schema whose references lead the compiler `length` levels deep."""
    levels = {
        f"d{i}": {
            "type": "object",
            "properties": {"a": {"$ref": f"#/$defs/d{i + 1}"}},
            "required": ["a"],
        }
        for i in range(length)
    }
    return json.dumps({"$ref": "#/$defs/d0", "$defs": levels | {f"d{length}": {}}})


def branch(name: str) -> dict[str, object]:
    return {"type": "object", "properties": {"kind": {"const": name}}, "required": ["kind"]}


# A linked list; its union is within itself.
LIST = json.dumps(
    {
        "$ref": "#/$defs/node",
        "$defs": {
            "node": {
                "type": "object",
                "properties": {"next": {"oneOf": [{"type": "null"}, {"$ref": "#/$defs/node"}]}},
                "required": ["next"],
                "additionalProperties": False,
            }
        },
    }
)
GOOD = [
    ("json_schema", "{}"), ("json_schema", "true"), ("json_schema", '{"type":"object"}'),
    ("json_schema", '{"type":"integer","maximum":20000000000}'),
    ("json_schema", '{"type":"integer","minimum":-1e30,"maximum":1e30}'),
    ("json_schema", '{"type":"integer","minimum":-9223372036854775808,"maximum":1e19}'),
    ("json_schema", '{"minimum":-1e300,"exclusiveMaximum":18446744073709551616}'),
    ("json_schema", '{"type":"string","maxLength":1e20}'),
    ("json_schema", '{"type":"string","format":"password"}'),
    ("json_schema", json.dumps({"oneOf": [{"$ref": "#/$defs/a"}, {"$ref": "#/$defs/b~1"}],
                                "$defs": {"a": branch("a"), "b/": branch("b")}})),
    ("json_schema", '{"type":"object","properties":{"城市":{},"🌡":{}},"required":["城市","🌡"]}'),
    ("json_schema", '{"$ref":"#/$defs/a","$defs":{"a":{"anyOf":[{"$ref":"#/$defs/a"},{}]}}}'),
    ("json_schema", LIST),
    ("json_schema", chain(50)), ("regex", "^[a-z]+$"), ("regex", "a/b\\n\""), ("regex", "(a+)+$"),
    ("regex", "(.*a){20}"), ("choice", '["a","\\"","","\\\\","漢"]'), ("grammar", 'start: "a"+'),
    ("grammar", 'root ::= [0-9]+ ("x" | "y")?'), ("grammar", "start: <|open|> /a/ <|close|>"),
    ("grammar", 'start: %json {"type": "null"}'),
]  # fmt: skip
BAD = [
    ("json_schema", '{"type":"objec"}', "objec"),
    ("json_schema", '{"properties":{"a":{"pattern":"[a-"}}}', "unclosed character class"),
    ("json_schema", '{"$ref":"#/$defs/none"}', "/$defs/none"),
    ("json_schema", '{"$ref":"http://x/y"}', "http://x/y"),
    ("json_schema", '{"type":"integer","minimum":3,"maximum":2}', "minimum"),
    ("json_schema", '{"not":{}}', "not"),
    ("json_schema", '{"type":"integer","minimum":1e19}', "10^18"),
    ("json_schema", '{"uniqueItems":true,"type":"array"}', "uniqueItems"),
    ("json_schema", '{"oneOf":[{"type":"integer"},{"type":"number"}]}', "anyOf"),
    ("json_schema", '{"enum":[]}', "empty"), ("json_schema", "false", "false"),
    ("json_schema", "[]", "object"), ("json_schema", "{", "JSON"),
    ("json_schema", '{"a":' * 70 + "{}" + "}" * 70, "deeper"),
    ("regex", "(", "unclosed group"), ("regex", "(?=a)b", "look"),
    ("regex", "(a+)+$" * 40, "lookaround"), ("regex", "a|" * MAX_TEXT, str(MAX_TEXT)),
    ("choice", "[]", "non-empty"), ("choice", '["a",1]', "strings"), ("choice", '"a"', "list"),
    ("grammar", "start: foo", "foo"), ("grammar", 'start: "a', ""),
    ("json_schema", LIST.replace("null", "object"), "anyOf"),
    ("grammar", "root ::= (", "GBNF"), ("grammar", 'root ::= "a"\n' + 'a ::= "b"\n' * 600, "601"),
    ("grammar", 'foo: "a"', "start"), ("grammar", "start: a\na: a", "no text"),
    ("grammar", "start: <|nope|>", "nope"), ("grammar", "start: " + "(" * 50_000, "nested"),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "text"), GOOD, ids=lambda value: str(value)[:40])
def test_good(trials: Trials, kind: str, text: str) -> None:
    constraint = Constraint(kind, text)  # type: ignore[arg-type]
    assert trials.verdict(constraint) == ""
    assert trials.known(constraint) == ""


@pytest.mark.parametrize(("kind", "text", "reason"), BAD, ids=lambda value: str(value)[:40])
def test_bad(trials: Trials, kind: str, text: str, reason: str) -> None:
    verdict = trials.verdict(Constraint(kind, text))  # type: ignore[arg-type]
    assert verdict and reason in verdict and len(verdict) < 600
    assert "\n" not in verdict


def test_a_crash_concerns_its_grammar_only(trials: Trials) -> None:
    crashes = Constraint("json_schema", chain(2500))
    assert trials.verdict(crashes) == CRASHED == trials.known(crashes)
    assert trials.verdict(Constraint("regex", "a+")) == ""


def test_a_slow_one_is_given_up_and_holds_nobody_up(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(tmp_path)
    slow = Constraint("regex", "".join(f"(a|b{i})?" for i in range(20_000)))
    quick = Constraint("regex", "a+")
    own = Trials(vocabulary_of(tokenizer), limit_s=1.5)
    assert own.verdict(quick) == ""
    verdicts: list[str] = []
    thread = threading.Thread(target=lambda: verdicts.append(own.verdict(slow)))
    thread.start()
    assert own.verdict(Constraint("choice", '["b"]')) == ""
    thread.join()
    assert verdicts == ["takes longer than 1.5 s to compile"]
    assert own.known(slow) is None and own.verdict(quick) == ""


def test_a_process_that_does_not_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = Trials(vocabulary_of(load_tokenizer(tmp_path)))
    monkeypatch.setattr(trial.sys, "executable", "/bin/false")
    with pytest.raises(TrialUnavailable):
        own.verdict(Constraint("regex", "a"))


def test_a_process_that_somebody_ends_blames_no_grammar(tmp_path: Path) -> None:
    own = Trials(vocabulary_of(load_tokenizer(tmp_path)), limit_s=30.0)
    assert own.verdict(Constraint("regex", "a")) == ""
    (worker,) = own._idle
    worker._process.send_signal(signal.SIGINT)  # as Ctrl-C in a terminal does
    assert own.verdict(Constraint("regex", "b")) == "" and own._idle == [worker]
    worker._process.kill()
    worker._process.wait()
    assert own.verdict(Constraint("regex", "c")) == "" and own._idle != [worker]
