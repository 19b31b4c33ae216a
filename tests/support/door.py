"""A small HTTP client for tests: JSON in, JSON out, streams as lists of events."""

import json
from types import TracebackType
from typing import Any, Self

import httpx
import orjson


class Door:
    """Talks to one server. `model` is added to every body that lacks it."""

    def __init__(self, url: str, model: str = "tiny") -> None:
        self.url = url
        self.model = model
        self.http = httpx.Client(base_url=url, timeout=60, verify=False)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        self.http.close()

    def post(self, path: str, **body: Any) -> httpx.Response:
        return self.http.post(path, content=json.dumps({"model": self.model} | body))

    def ok(self, path: str, **body: Any) -> dict[str, Any]:
        response = self.post(path, **body)
        assert response.status_code == 200, response.text[:2000]
        answer = orjson.loads(response.content)
        assert isinstance(answer, dict)
        return answer

    def complete(self, prompt: Any, **body: Any) -> dict[str, Any]:
        return self.ok("/v1/completions", prompt=prompt, **body)

    def text(self, prompt: Any, **body: Any) -> str:
        return str(self.complete(prompt, **body)["choices"][0]["text"])

    def chat(self, content: Any = "hi", **body: Any) -> dict[str, Any]:
        body.setdefault("messages", [{"role": "user", "content": content}])
        return self.ok("/v1/chat/completions", **body)

    def refused(self, path: str, status: int = 400, **body: Any) -> dict[str, Any]:
        """The error object of a request that must fail with `status`."""
        return envelope(self.post(path, **body), status)

    def events(self, path: str, **body: Any) -> list[Any]:
        """The parsed events of a stream that must end with [DONE]."""
        response = self.post(path, stream=True, **body)
        assert response.status_code == 200, response.text[:2000]
        assert response.headers["content-type"].startswith("text/event-stream")
        return parse_events(response.text)

    def metric(self, name: str) -> float:
        """The sum over all samples of one metric."""
        lines = self.http.get("/metrics").text.splitlines()
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(name + "{"))


def parse_events(text: str) -> list[Any]:
    blocks = text.split("\n\n")
    assert blocks.pop() == ""
    assert blocks.pop() == "data: [DONE]"
    data = [block.removeprefix("data: ") for block in blocks if not block.startswith(":")]
    return [orjson.loads(one) for one in data]


def envelope(response: httpx.Response, status: int) -> dict[str, Any]:
    assert response.status_code == status, f"{response.status_code}: {response.text[:2000]}"
    assert len(response.content) < 10_000
    body = orjson.loads(response.content)
    assert set(body) == {"error"}
    error = body["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert isinstance(error["message"], str) and error["message"]
    assert isinstance(error["type"], str)
    return dict(error)


def joined(events: list[Any], index: int = 0) -> str:
    """The text of choice `index` of a completions stream."""
    return "".join(
        choice["text"]
        for event in events
        for choice in event["choices"]
        if choice["index"] == index
    )


def chat_joined(events: list[Any], part: str = "content", index: int = 0) -> str:
    return "".join(
        choice["delta"].get(part) or ""
        for event in events
        for choice in event["choices"]
        if choice["index"] == index
    )


def finish(events: list[Any], index: int = 0) -> list[str]:
    """Every finish_reason of the choice: exactly one in a good stream."""
    return [
        choice["finish_reason"]
        for event in events
        for choice in event["choices"]
        if choice["index"] == index and choice["finish_reason"]
    ]
