"""5,000 requests made from /openapi.json against a real server: each gets an answer that the
document describes, none a 5xx, and nothing of them stays.

Hypothesis makes bodies that fit the schema and bodies that break it. Making one costs more than
answering it, so each is sent in several forms at once: as it is, streamed, and every field of it
alone on top of a request that works, which is what reaches the engine.
"""

import threading
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from typing import Any

import pytest
import requests
import schemathesis
from hypothesis import HealthCheck, Phase, given, seed, settings
from schemathesis import Case, GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.config import SchemathesisConfig
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    negative_data_rejection,
    response_headers_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from tests.support.checkpoints import write_checkpoint
from tests.support.door import Door
from tests.support.watched_server import MEGABYTE, WatchedServer, watched_server

TOTAL, WARM_UP = 5000, 600
RSS_GROWTH = 48 * MEGABYTE
CONFORMS = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
]
WORKING: dict[str, dict[str, Any]] = {
    "/v1/completions": {"model": "tiny", "prompt": "ab", "max_tokens": 2},
    "/v1/chat/completions": {
        "model": "tiny", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 2,
        "chat_template_kwargs": {"thinking": False},
    },
    "/tokenize": {"model": "tiny", "prompt": "ab"},
    "/detokenize": {"model": "tiny", "tokens": [97]},
}  # fmt: skip
# (path, method, bodies that fit, bodies that do not): about in the order of what can go wrong.
OPERATIONS = [
    ("/v1/completions", "POST", 110, 230),
    ("/v1/chat/completions", "POST", 70, 40),
    ("/tokenize", "POST", 50, 50),
    ("/detokenize", "POST", 100, 100),
    ("/v1/models/{model_id}", "GET", 60, 0),
    ("/mesh/scale", "POST", 40, 40),
    ("/mesh/routing/record", "POST", 20, 20),
    ("/mesh/rebalance", "POST", 20, 20),
    ("/v1/sessions/{session_id}", "GET", 20, 0),
    ("/v1/sessions/{session_id}", "DELETE", 20, 0),
    ("/v1/sessions/{session_id}/resume", "POST", 20, 20),
    ("/v1/sessions/{session_id}/fork", "POST", 20, 20),
]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[WatchedServer]:
    model = write_checkpoint(
        tmp_path_factory.mktemp("model") / "tiny", tokenizer=True, num_hidden_layers=2
    )
    limits = ("--max-model-len", "448", "--max-running", "8", "--kv-pages", "64")
    with watched_server(model, *limits) as server:
        yield server


def small(path: str, body: Any) -> Any:
    """The body, asking for few tokens where it would get many: those say nothing new. Whatever is
    wrong with it stays wrong."""
    if not isinstance(body, dict):
        return body
    for name, most in (("n", 3), ("best_of", 3), ("min_tokens", 2)):
        value = body.get(name)
        if type(value) is int and most < value <= 128:
            body = {**body, name: most}
    limits = (body.get("max_tokens"), body.get("max_completion_tokens"))
    if "completions" in path and limits == (None, None):
        body = {**body, "max_tokens": 2}
    if isinstance(body.get("model"), str) and body["model"]:
        body = {**body, "model": "tiny"}
    return body


def variants(path: str, body: Any) -> Iterator[Any]:
    """What is sent besides the body itself."""
    base = WORKING.get(path)
    if base is None or not isinstance(body, dict):
        return
    if "completions" in path:
        yield {**body, "stream": True}
    for name, value in body.items():
        yield {**base, name: value}
        if "completions" in path and name not in base:
            yield {**base, name: value, "stream": True}


class Fuzz:
    """Sends and checks. Counts (path, status)."""

    def __init__(self, url: str) -> None:
        self._threads = ThreadPoolExecutor(4)
        self._own = threading.local()
        config = SchemathesisConfig.from_dict({"max-stream-events": 10_000})
        self.schema = schemathesis.openapi.from_url(f"{url}/openapi.json", config=config)
        self.counts: Counter[tuple[str, int]] = Counter()

    @property
    def sent(self) -> int:
        return self.counts.total()

    def send(self, case: Case, checks: list[Callable[..., Any]]) -> None:
        if not hasattr(self._own, "session"):
            self._own.session = requests.Session()
        response = case.call(session=self._own.session)
        self.counts[case.path, response.status_code] += 1
        case.validate_response(response, checks=checks)
        content = response.content
        kind = response.headers.get("content-type", [""])[0]
        if kind.startswith("text/event-stream"):
            assert content.endswith(b"data: [DONE]\n\n"), content[-200:]

    def case(self, case: Case, most: int) -> None:
        """One body in all its forms, at most so many."""
        body = small(case.path, case.body)
        case.body = body
        self.send(case, [*CONFORMS, negative_data_rejection])
        forms = []
        for other in islice(variants(case.path, body), most):
            form = case.operation.Case(
                body=small(case.path, other), headers=case.headers, media_type=case.media_type
            )
            forms.append(self._threads.submit(self.send, form, CONFORMS))
        for sent in forms:
            sent.result()

    def visit(self) -> None:
        """Every path that can be had without a parameter."""
        for result in self.schema.get_all_operations():
            operation = result.ok()
            if operation.method.upper() == "GET" and "{" not in operation.path:
                self.send(operation.Case(), CONFORMS)

    def operation(
        self, path: str, method: str, mode: GenerationMode, examples: int, start: int = 4
    ) -> None:
        operation = self.schema[path][method]

        @seed(start)
        @settings(
            max_examples=examples, deadline=None, database=None, phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
        )  # fmt: skip
        @given(case=operation.as_strategy(generation_mode=mode))
        def run(case: Case) -> None:
            self.case(case, 12)

        run()


@pytest.mark.timeout(600)
def test_five_thousand_requests(server: WatchedServer) -> None:
    fuzz = Fuzz(server.url)
    with Door(server.url) as door:
        expected = door.text("The next ordinary request", max_tokens=8, temperature=0)
        fuzz.visit()
        memory = 0
        for path, method, fitting, broken in OPERATIONS:
            for mode, examples in (
                (GenerationMode.POSITIVE, fitting), (GenerationMode.NEGATIVE, broken)
            ):  # fmt: skip
                if examples:
                    fuzz.operation(path, method, mode, examples)
            if not memory and fuzz.sent > WARM_UP:
                memory = server.rss()
        start = 5
        while fuzz.sent < TOTAL:  # other versions of the makers make other numbers
            fuzz.operation("/v1/completions", "POST", GenerationMode.NEGATIVE, 40, start)
            start += 1
        assert door.text("The next ordinary request", max_tokens=8, temperature=0) == expected
    server.wait_idle()
    assert server.rss() - memory < RSS_GROWTH
    assert sum(n for (_, status), n in fuzz.counts.items() if status == 200) > 1000, fuzz.counts
