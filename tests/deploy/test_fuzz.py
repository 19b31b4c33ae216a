"""Whatever the JSON, the answer is 200 or a 4xx in the one envelope, and the next request works."""

import json
from typing import Any

import orjson
from hypothesis import given, settings
from hypothesis import strategies as st

from expertmesh.deploy.front import Front
from expertmesh.deploy.openai.app import build_app
from expertmesh.deploy.openai.protocol import ChatRequest, CompletionRequest
from expertmesh.deploy.openai.served import ServedModel
from tests.support.door import Door, envelope
from tests.support.fake_client import FakeEngineClient
from tests.support.http_server import http_server

VALUES: st.SearchStrategy[Any] = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.integers(-3, 5)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=6)
    | st.sampled_from(["user", "system", "assistant", "tool", "text", "function", "auto", "none"]),
    lambda children: (
        st.lists(children, max_size=4)
        | st.dictionaries(
            st.text(max_size=4)
            | st.sampled_from(["role", "content", "type", "text", "function", "name", "tools"]),
            children,
            max_size=4,
        )
    ),
    max_leaves=12,
)


def bodies(model: Any, base: dict[str, Any]) -> st.SearchStrategy[dict[str, Any]]:
    fields = [name for name in model.model_fields if name != "model"]
    changes = st.dictionaries(st.sampled_from(fields), VALUES, max_size=3)
    return changes.map(lambda changed: base | changed)


COMPLETION = bodies(CompletionRequest, {"prompt": "hi", "max_tokens": 2})
CHAT = bodies(ChatRequest, {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2})


def test_any_json_gets_an_answer(served: ServedModel) -> None:
    client = FakeEngineClient()
    with http_server(build_app(Front(client, served))) as url, Door(url) as door:

        @settings(max_examples=120)
        @given(body=COMPLETION)
        def completions(body: dict[str, Any]) -> None:
            check(door, "/v1/completions", body)

        @settings(max_examples=120)
        @given(body=CHAT)
        def chat(body: dict[str, Any]) -> None:
            check(door, "/v1/chat/completions", body)

        completions()
        chat()
        assert door.text("ab", max_tokens=2) == "ab"
        assert client.running == 0


def check(door: Door, path: str, body: dict[str, Any]) -> None:
    response = door.http.post(path, content=json.dumps({"model": "tiny"} | body))
    assert response.status_code in (200, 400), response.text[:500]
    if response.status_code == 400:
        envelope(response, 400)
    elif response.headers["content-type"].startswith("application/json"):
        assert orjson.loads(response.content)["choices"]
    else:
        assert response.text.endswith("data: [DONE]\n\n")


def test_the_document_of_the_api_is_whole(door: Door) -> None:
    """Every reference of /openapi.json resolves."""
    document = door.http.get("/openapi.json").json()
    assert set(document["paths"]["/v1/completions"]) == {"post"}
    text = json.dumps(document)
    names = {piece.split('"')[0] for piece in text.split("#/components/schemas/")[1:]}
    assert {"CompletionRequest", "ChatRequest", "StreamOptions"} <= names
    assert names <= set(document["components"]["schemas"])
