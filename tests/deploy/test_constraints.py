"""The door's part of constraints without a server: verdicts, and failures on the way."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import pytest

from expertmesh.actors.attention.messages import GenerateRequest, SamplingParams, TokenOutput
from expertmesh.actors.constraint.spec import Constraint
from expertmesh.actors.constraint.trial import Trials, TrialUnavailable
from expertmesh.deploy.openai import constraints
from expertmesh.deploy.openai.errors import ApiError
from expertmesh.deploy.openai.protocol import CompletionRequest
from expertmesh.deploy.openai.run import one_choice
from expertmesh.deploy.openai.served import ServedModel

REGEX = Constraint("regex", "a+", "structured_outputs.regex")


def admit(served: ServedModel, *grammars: Constraint) -> None:
    asyncio.run(constraints.admit(grammars, served))


def refusal(served: ServedModel, *grammars: Constraint) -> ApiError:
    with pytest.raises(ApiError) as caught:
        admit(served, *grammars)
    return caught.value


def test_the_first_that_does_not_compile_is_named(served: ServedModel) -> None:
    admit(served, REGEX)
    admit(served)
    bad = Constraint("regex", "(", "tools[1].function.parameters")
    error = refusal(served, REGEX, bad, Constraint("regex", "[", "x"))
    assert (error.status, error.param) == (400, "tools[1].function.parameters")
    assert "unclosed group" in error.message


def test_no_verdict_is_no_refusal(served: ServedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    def nobody(self: Trials, constraint: Constraint) -> str:
        raise TrialUnavailable("no process")

    monkeypatch.setattr(Trials, "verdict", nobody)
    error = refusal(served, Constraint("regex", "never seen"))
    assert (error.status, error.param) == (503, None) and "no process" in error.message


def test_a_queue_that_is_too_long(served: ServedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    async def run() -> None:
        gate = asyncio.Event()
        loop = asyncio.get_running_loop()

        def busy(self: Trials, constraint: Constraint) -> str:
            asyncio.run_coroutine_threadsafe(gate.wait(), loop).result()
            return ""

        monkeypatch.setattr(Trials, "verdict", busy)
        monkeypatch.setattr(constraints, "PATIENCE_S", 0.05)
        with pytest.raises(ApiError) as caught:
            await constraints.admit([Constraint("regex", "late")], served)
        assert caught.value.status == 503 and caught.value.retry_after is not None
        gate.set()

    asyncio.run(run())


def test_without_a_tokenizer(served: ServedModel) -> None:
    blind = replace(served, tokenizer=None)
    for body in ({"response_format": {"type": "json_object"}},
                 {"structured_outputs": {"choice": ["a"]}}):  # fmt: skip
        request = CompletionRequest.model_validate({"model": "tiny", "prompt": "x"} | body)
        with pytest.raises(ApiError) as caught:
            constraints.asked(request, blind)
        assert (caught.value.status, caught.value.param) == (400, next(iter(body)))


def test_text_within_the_request_may_not_nest_deeper(served: ServedModel) -> None:
    deep = '{"a":' * 300 + "{}" + "}" * 300
    body = {"model": "tiny", "prompt": "x", "structured_outputs": {"json": deep}}
    with pytest.raises(ApiError, match="deeply") as caught:
        constraints.asked(CompletionRequest.model_validate(body), served)
    assert (caught.value.status, caught.value.param) == (400, "structured_outputs.json")


def test_a_grammar_that_fails_on_the_way_is_the_request_s_fault() -> None:
    class Failing:
        async def generate(self, request: GenerateRequest, *rest: Any) -> (
            AsyncIterator[TokenOutput]
        ):  # fmt: skip
            yield TokenOutput(request_id="r", token_ids=[1])
            yield TokenOutput(
                request_id="r", finish_reason="error", error="structured_outputs.regex: broke",
                error_field="structured_outputs.regex",
            )  # fmt: skip

    async def run() -> None:
        request = GenerateRequest("r", [1], SamplingParams(max_tokens=4), constraint=REGEX)
        client: Any = Failing()
        async for _ in one_choice(client, request, lambda output: (output, False), lambda: 0.0):
            pass

    with pytest.raises(ApiError) as caught:
        asyncio.run(run())
    assert (caught.value.status, caught.value.param) == (400, "structured_outputs.regex")
