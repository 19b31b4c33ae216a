"""The official client: answers, streams, errors and iteration work as its users expect."""

from collections.abc import Iterator

import openai
import pytest

from tests.deploy.test_chat import CALL, PLAIN, THOUGHT, WEATHER, answers
from tests.support.door import Door
from tests.support.fake_client import FakeEngineClient

USER: list[openai.types.chat.ChatCompletionUserMessageParam] = [{"role": "user", "content": "hi"}]


@pytest.fixture
def client(door: Door) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{door.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def test_models(client: openai.OpenAI) -> None:
    (model,) = client.models.list().data
    assert model.id == "tiny" and model.model_extra == {
        "root": "/models/tiny", "parent": None, "max_model_len": 1024,
    }  # fmt: skip
    assert client.models.retrieve("tiny").created == model.created


def test_completion(client: openai.OpenAI) -> None:
    answer = client.completions.create(model="tiny", prompt="hello", max_tokens=2, logprobs=1)
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage is not None and answer.usage.completion_tokens == 2
    scores = answer.choices[0].logprobs
    assert scores is not None and scores.tokens is not None and len(scores.tokens) == 2
    stream = client.completions.create(
        model="tiny", prompt="hello", max_tokens=2, stream=True,
        stream_options={"include_usage": True},
    )  # fmt: skip
    chunks = list(stream)
    text = "".join(choice.text for chunk in chunks for choice in chunk.choices)
    assert text == answer.choices[0].text and chunks[-1].usage == answer.usage


def test_chat(client: openai.OpenAI, fake: FakeEngineClient) -> None:
    answers(fake, THOUGHT)
    answer = client.chat.completions.create(
        model="tiny", messages=USER, logprobs=True, top_logprobs=2, seed=1
    )
    message = answer.choices[0].message
    assert message.content == "Hello 漢!"
    assert message.model_extra == {"reasoning_content": "hmm"}
    assert answer.choices[0].logprobs is not None
    # The client's own message object, sent back as it dumps it.
    answers(fake, PLAIN)
    history = [*USER, message.model_dump(), *USER]
    client.chat.completions.create(
        model="tiny", messages=history, extra_body={"chat_template_kwargs": {"thinking": False}}
    )  # type: ignore[call-overload]


def test_chat_stream_with_tools(client: openai.OpenAI, fake: FakeEngineClient) -> None:
    answers(fake, CALL)
    with client.chat.completions.stream(model="tiny", messages=USER, tools=[WEATHER]) as stream:
        final = stream.get_final_completion()
    choice = final.choices[0]
    assert choice.finish_reason == "tool_calls" and choice.message.content == "Let me look."
    assert choice.message.tool_calls is not None
    assert choice.message.tool_calls[0].function.name == "get_weather"


def test_errors(client: openai.OpenAI, fake: FakeEngineClient) -> None:
    with pytest.raises(openai.NotFoundError) as missing:
        client.completions.create(model="other", prompt="x")
    assert missing.value.code == "model_not_found" and missing.value.param == "model"
    with pytest.raises(openai.BadRequestError) as bad:
        client.completions.create(model="tiny", prompt="x", top_p=7)
    assert bad.value.param == "top_p" and bad.value.type == "invalid_request_error"
    fake.down = "loading"
    with pytest.raises(openai.InternalServerError) as down:
        client.completions.create(model="tiny", prompt="x")
    assert down.value.status_code == 503 and "loading" in down.value.message
    fake.down, fake.fail_after = "", 2
    with pytest.raises(openai.APIError, match="rank 1"):
        for _ in client.completions.create(model="tiny", prompt="x", max_tokens=9, stream=True):
            pass
