"""Random schemas through the golden models, whose weights are random as well: whatever ends by
itself is JSON that the schema's reference implementation accepts."""

import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from expertmesh.actors.attention.engine import Engine
from expertmesh.actors.attention.messages import GenerateRequest, SamplingParams
from expertmesh.actors.attention.settings import EngineSettings
from expertmesh.actors.constraint.spec import Constraint
from expertmesh.actors.constraint.vocabulary import vocabulary_of
from expertmesh.actors.model.tokenizer import Tokenizer
from tests.support.chat import VOCAB, load_tokenizer
from tests.support.constraints import grammars_of
from tests.support.engines import check_idle, finish
from tests.support.golden import GOLDEN
from tests.support.runner import Runner
from tests.support.tokenizers import special_names

END = special_names(VOCAB)["<|end_of_msg|>"]
TOGETHER = 16

NAMES = st.sampled_from(["a", "b", "name", "城市", "🌡", 'q"uote', "a b"])
NUMBERS = st.builds(
    lambda kind, low, size: {"type": kind, "minimum": low, "maximum": low + size},
    st.sampled_from(["integer", "number"]),
    st.integers(-(10**12), 10**12),
    st.integers(0, 10**10),
)
TEXTS = st.builds(lambda low, more: {"type": "string", "minLength": low, "maxLength": low + more},
                  st.integers(0, 2), st.integers(0, 4))  # fmt: skip
PATTERNS = st.sampled_from(["^[a-f]{1,4}$", "^(x|yz){2}$", "^\\d\\d-[A-Z]$", "^é*$"]).map(
    lambda pattern: {"type": "string", "pattern": pattern}
)
VALUES = st.none() | st.booleans() | st.integers(-(2**40), 2**40) | st.text(max_size=4)
CHOICES = st.lists(VALUES, min_size=1, max_size=3).map(lambda values: {"enum": values})
LEAVES = st.one_of(
    NUMBERS, TEXTS, PATTERNS, CHOICES, st.sampled_from([{"type": "boolean"}, {"type": "null"}])
)


def arrays(items: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.builds(lambda item, low: {"type": "array", "items": item, "minItems": low,
                                        "maxItems": low + 1}, items, st.integers(0, 1))  # fmt: skip


def objects(members: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    def make(properties: dict[str, Any], needed: list[str]) -> dict[str, Any]:
        required = [name for name in properties if name in needed]
        return {"type": "object", "properties": properties, "required": required,
                "additionalProperties": False}  # fmt: skip

    properties = st.dictionaries(NAMES, members, max_size=3)
    return st.builds(make, properties, st.lists(NAMES, max_size=3))


def unions(branches: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.lists(branches, min_size=1, max_size=2).map(lambda some: {"anyOf": some})


SCHEMAS = st.recursive(
    LEAVES, lambda inner: st.one_of(arrays(inner), objects(inner), unions(inner)), max_leaves=4
)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return load_tokenizer(tmp_path_factory.mktemp("k3"))


@pytest.fixture(scope="module", params=["kimi_k3-tiny", "kimi_linear-tiny"])
def runner(request: pytest.FixtureRequest) -> Runner:
    return Runner(Path(GOLDEN) / request.param, slots=1, pages_each=1, banks=1)


@settings(max_examples=2)
@given(schemas=st.lists(SCHEMAS, min_size=TOGETHER, max_size=TOGETHER), seed=st.integers(0, 99))
def test_what_ends_is_valid(
    runner: Runner, tokenizer: Tokenizer, schemas: list[Any], seed: int
) -> None:
    grammars = grammars_of(vocabulary_of(tokenizer, [END]))
    state = runner.model.new_state(4 * TOGETHER, TOGETHER)
    engine = Engine(runner.model, state, runner.exchange, EngineSettings(), [END], grammars)
    for number, schema in enumerate(schemas):
        params = SamplingParams(
            max_tokens=90, temperature=float(number % 3), seed=seed + number, logprobs=1
        )
        constraint = Constraint("json_schema", json.dumps(schema))
        request = GenerateRequest(str(number), [1, 2, 3], params, constraint=constraint)
        engine.submit(request)
    answers = finish(engine)
    assert engine.failed is None
    for number, schema in enumerate(schemas):
        answer = answers[str(number)]
        assert answer.finish_reason in ("stop", "length"), (schema, answer.error)
        if answer.finish_reason == "stop":
            text = tokenizer.decode_bytes(answer.token_ids[:-1]).decode()
            jsonschema.validate(json.loads(text), schema)
        assert all(score.logprob > -9999 or score.logprob == -9999 for score in answer.logprobs)
    ended = [answer.finish_reason for answer in answers.values()].count("stop")
    assert ended >= TOGETHER // 2
    check_idle(engine)
