"""What the answer must be, over gRPC: the same grammars as over HTTP."""

import re
from typing import Any

import grpc
import orjson
import pytest

from expertmesh.deploy.rpc.v1 import engine_pb2 as pb
from expertmesh.deploy.rpc.v1.engine_pb2_grpc import EngineStub
from tests.support.door import Door
from tests.support.fake_client import FakeEngineClient
from tests.support.grpc_calls import Answer, ask, refused

SCHEMA = (
    '{"type":"object","properties":{"a":{"type":"integer","maximum":9,"minimum":0}},'
    '"required":["a"],"additionalProperties":false}'
)
CHOICES = ["hello", "the other one"]


def test_a_choice_a_pattern_and_a_schema(real_engine: EngineStub, real: Door) -> None:
    def text(**constraint: Any) -> str:
        request = ask("hello", max_tokens=60, temperature=1, seed=3, **constraint)
        answer = Answer(real_engine.Generate(request, timeout=60))
        assert answer.ends[0].finish_reason == "stop"
        return answer.text()

    assert text(choice=pb.ChoiceConstraint(choices=CHOICES)) in CHOICES
    assert re.fullmatch("[ab]{3,5}", text(regex="[ab]{3,5}"))
    assert text(grammar='start: "yes" | "no"') in ("yes", "no")
    parsed = orjson.loads(text(json_schema=SCHEMA))
    assert set(parsed) == {"a"} and 0 <= parsed["a"] <= 9
    want = real.text(
        "hello", max_tokens=60, temperature=1, seed=3, structured_outputs={"json": SCHEMA}
    )
    assert text(json_schema=SCHEMA) == want


@pytest.mark.parametrize(
    ("constraint", "field"),
    [
        ({"json_schema": "{"}, "json_schema"),
        ({"json_schema": '{"type": "nothing"}'}, "json_schema"),
        ({"regex": "(["}, "regex"),
        ({"grammar": "start: nowhere"}, "grammar"),
        ({"json_object": False}, "json_object"),
        ({"choice": pb.ChoiceConstraint()}, "choice"),
    ],
)
def test_one_that_can_not_be_compiled(
    engine: EngineStub, fake: FakeEngineClient, constraint: dict[str, Any], field: str
) -> None:
    code, message, details = refused(engine.Generate(ask(**constraint), timeout=60))
    assert code is grpc.StatusCode.INVALID_ARGUMENT and message
    assert details["BadRequest"].field_violations[0].field == f"sampling_params.{field}"
    assert "structured_outputs" not in message
    assert not fake.requests
