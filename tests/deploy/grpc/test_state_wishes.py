"""What HTTP has about cached state, over gRPC: wishes in, reports out."""

from expertmesh.actors.attention.messages import GenerateRequest
from expertmesh.deploy.rpc.v1.engine_pb2_grpc import EngineStub
from tests.deploy.test_cached_state import REPORT, TOLD
from tests.support.fake_client import FakeEngineClient
from tests.support.grpc_calls import Answer, ask, refused


def state(request: GenerateRequest) -> tuple[str, str, str]:
    return request.tenant, request.kv_mode, request.session


def test_wishes_and_reports_are_http_s(engine: EngineStub, fake: FakeEngineClient) -> None:
    fake.kv, fake.cached = REPORT, lambda request: 3
    wish = ask("hello", cache_salt="s", kv_mode="select", session_id="chat-1", max_tokens=2)
    end = Answer(engine.Generate(wish, timeout=30)).ends[0]
    assert [state(request) for request in fake.requests] == [("/s", "select", "chat-1")]
    assert end.cached_tokens == 3
    assert {name: getattr(end.kv, name) for name in TOLD} == TOLD
    fake.kv = None
    assert not Answer(engine.Generate(ask(max_tokens=1), timeout=30)).ends[0].HasField("kv")
    assert state(fake.requests[-1]) == ("/", "", "")


def test_wrong_wishes_are_refused_by_name(engine: EngineStub) -> None:
    for field, value in (("cache_salt", ""), ("kv_mode", "x"), ("session_id", "a/b")):
        _, _, details = refused(engine.Generate(ask(**{field: value}), timeout=30))
        assert details["BadRequest"].field_violations[0].field == field
