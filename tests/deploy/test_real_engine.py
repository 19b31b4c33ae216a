"""The door over a real engine and a tiny random model: the reports that need one."""

import asyncio
import base64
import io
import threading
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from expertmesh.actors.attention.settings import EngineSettings
from expertmesh.actors.model.loading import LoadSettings
from expertmesh.cluster import metrics
from expertmesh.deploy.front import Front
from expertmesh.deploy.one_process import start_local
from expertmesh.deploy.openai.app import build_app
from expertmesh.deploy.openai.describe import describe
from tests.deploy.test_completions import both
from tests.support.door import Door, joined
from tests.support.http_server import http_server

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
V = 512  # of the checkpoint
PROMPT = "correct horse battery staple"


def gather(url: str, bodies: list[dict[str, Any]]) -> list[str]:
    """Completions sent at the same time; their texts in order."""

    async def run() -> list[str]:
        async with httpx.AsyncClient(base_url=url, timeout=120, verify=False) as client:
            answers = await asyncio.gather(
                *[client.post(COMPLETIONS, json={"model": "tiny"} | body) for body in bodies]
            )
        assert [answer.status_code for answer in answers] == [200] * len(bodies), answers
        return [answer.json()["choices"][0]["text"] for answer in answers]

    return asyncio.run(run())


def greedy(door: Door, prompt: Any = PROMPT, tokens: int = 8, **body: Any) -> str:
    return door.text(prompt, max_tokens=tokens, temperature=0, ignore_eos=True, **body)


def test_stream_equals_plain(real: Door) -> None:
    both(real, PROMPT, max_tokens=12, temperature=0, logprobs=3, echo=True)
    both(real, [1, 2, 3], max_tokens=12, seed=3, n=2, ignore_eos=True)
    text = greedy(real, tokens=24)
    stop = text[len(text) // 2 :][:2]
    plain, _ = both(real, PROMPT, max_tokens=24, temperature=0, ignore_eos=True, stop=stop)
    assert plain["choices"][0]["stop_reason"] == stop
    assert plain["choices"][0]["text"] == text[: text.index(stop)]


def test_empty_prompts_leave_running_streams_alone(real: Door) -> None:
    bodies = [{"prompt": f"stream {i}", "max_tokens": 40, "temperature": 0, "ignore_eos": True}
              for i in range(4)]  # fmt: skip
    undisturbed = [real.text(**body) for body in bodies]
    results: list[str] = [""] * 4

    def stream(number: int) -> None:
        with Door(real.url) as own:
            results[number] = joined(own.events(COMPLETIONS, **bodies[number]))

    threads = [threading.Thread(target=stream, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for prompt in ("", [""], [], [[]], ["ok", ""]):
        real.refused(COMPLETIONS, prompt=prompt)
    real.refused(CHAT, messages=[])
    real.refused(CHAT, messages=[{"role": "user", "content": "x"}], tools=[[[]]])
    real.refused(COMPLETIONS, prompt="x", stop_token_ids=[V + 100], min_tokens=1, max_tokens=4)
    for thread in threads:
        thread.join()
    assert results == undisturbed


def test_scoring_equals_generating(real: Door) -> None:
    """The log-probabilities of an answer are those of scoring prompt + answer."""
    made = real.complete(
        [5, 6, 7], max_tokens=5, temperature=0, logprobs=2, ignore_eos=True, return_token_ids=True
    )["choices"][0]
    scored = real.complete([5, 6, 7, *made["token_ids"]], max_tokens=0, logprobs=2, echo=True)[
        "choices"
    ][0]
    assert scored["finish_reason"] == "length"
    assert scored["logprobs"]["token_logprobs"][3:] == pytest.approx(
        made["logprobs"]["token_logprobs"], abs=1e-3
    )


def test_logit_bias_forces_a_token(real: Door) -> None:
    answer = real.complete(
        PROMPT, max_tokens=3, temperature=0, logit_bias={"97": 100}, return_token_ids=True
    )
    assert answer["choices"][0]["token_ids"] == [97, 97, 97]
    assert answer["choices"][0]["text"] == "aaa"


def test_small_temperatures_are_greedy(real: Door) -> None:
    expected = greedy(real, tokens=7)
    for temperature in (0, 1e-12, 1e-7, 1e-6, 1e-5, 1e-4):
        assert real.text(PROMPT, max_tokens=7, temperature=temperature, ignore_eos=True) == expected
    for extra in ({"top_k": 1}, {"top_p": 1e-9}):
        assert real.text(PROMPT, max_tokens=7, temperature=1, ignore_eos=True, **extra) == expected
    assert real.text(PROMPT, max_tokens=7, temperature=0, top_k=V, ignore_eos=True) == expected


def test_answers_do_not_depend_on_neighbours(real: Door) -> None:
    common = {"max_tokens": 16, "ignore_eos": True}
    bodies: list[dict[str, Any]] = [
        {"prompt": "one", "temperature": 0} | common,
        {"prompt": "two", "temperature": 0.8, "seed": 42} | common,
        {"prompt": "three", "temperature": 0, "min_tokens": 8, "max_tokens": 16},
        {"prompt": "four", "temperature": 1.0, "seed": 7} | common,
        {"prompt": "five", "temperature": 0, "repetition_penalty": 1.3} | common,
    ]
    alone = [real.text(**body) for body in bodies]
    noise = {"prompt": "noise", "temperature": 1.0} | common
    assert gather(real.url, [*bodies, noise])[:5] == alone
    assert gather(real.url, [noise, *reversed(bodies)])[1:] == alone[::-1]


def test_seeds(real: Door) -> None:
    def text(seed: int) -> str:
        return real.text(PROMPT, max_tokens=12, temperature=1.0, seed=seed, ignore_eos=True)

    assert text(0) == text(0) and text(-1) == text(-1)
    assert len({text(0), text(1), text(-1)}) == 3
    choices = real.complete(PROMPT, max_tokens=12, seed=4, n=3, ignore_eos=True)["choices"]
    assert [choice["text"] for choice in choices] == [text(4), text(5), text(6)]


def test_masked_tokens_stay_json(real: Door) -> None:
    answer = real.complete(
        PROMPT, echo=True, logprobs=5, temperature=1, top_k=1, max_tokens=4, min_tokens=4
    )
    scores = answer["choices"][0]["logprobs"]["token_logprobs"]
    assert all(score is None or score >= -9999.0 for score in scores)


def test_routed_experts(real: Door) -> None:
    answer = real.complete([3, 4, 5], max_tokens=4, return_routed_experts=True, ignore_eos=True)
    raw = base64.b64decode(answer["choices"][0]["routed_experts"])
    array = np.load(io.BytesIO(raw))
    assert array.dtype == np.int16 and array.shape == (3 + 4 - 1, 3, 2)  # 4 layers, the first dense
    assert array.min() >= 0 and array.max() < 8
    events = real.events(
        COMPLETIONS, prompt=[3, 4, 5], max_tokens=4, return_routed_experts=True, ignore_eos=True,
        seed=1,
    )  # fmt: skip
    assert "routed_experts" in events[-1]["choices"][0]


def test_never_fits_is_refused_with_numbers(real: Door) -> None:
    error = real.refused(COMPLETIONS, prompt=[1] * 1000, max_tokens=25)
    assert "1024" in error["message"]


def test_counters_equal_usage(real: Door) -> None:
    def counters() -> tuple[float, float]:
        return (
            real.metric("expertmesh_prompt_tokens_total"),
            real.metric("expertmesh_generation_tokens_total"),
        )

    before, prompt, generated = counters(), 0, 0
    for body in ({"n": 1}, {"n": 2}, {"n": 4, "stop": "a"}, {"n": 1, "max_tokens": 0}):
        usage = real.complete(PROMPT, **{"max_tokens": 6} | body)["usage"]
        prompt += usage["prompt_tokens"]
        generated += usage["completion_tokens"]
    after = counters()
    assert (after[0] - before[0], after[1] - before[1]) == (prompt, generated)


def test_counters_equal_usage_through_preemption(checkpoint: Path) -> None:
    """Eight choices that do not fit at once: rows are computed again, tokens are counted once."""
    server = start_local(LoadSettings(model=checkpoint), EngineSettings(pages=12, slots=6))
    try:
        info = describe(checkpoint, server.config)
        with http_server(build_app(Front(server.client, info))) as url, Door(url) as door:
            usage = door.complete([5] * 60, n=8, max_tokens=70, ignore_eos=True)["usage"]
            names = "prompt_tokens", "generation_tokens"
            edge = [door.metric(f"expertmesh_{name}_total") for name in names]
            engine = [door.metric(f"expertmesh_engine_{name}_total") for name in names]
            assert door.metric("expertmesh_num_preemptions_total") > 0
            assert door.metric("expertmesh_engine_recomputed_tokens_total") > 0
        assert edge == [usage["prompt_tokens"], usage["completion_tokens"]] == [60, 560]
        assert engine == [8 * 60, 560], "the engine counts sequences, and each of them once"
    finally:
        server.stop()


def test_many_parallel_answers_match_their_prompts(real: Door) -> None:
    """More requests than slots: each answer is the one its prompt gives alone."""
    bodies = [{"prompt": f"{i:02d}", "max_tokens": 3, "temperature": 0, "ignore_eos": True}
              for i in range(24)]  # fmt: skip
    together = gather(real.url, bodies)
    assert together == [real.text(**body) for body in bodies]


def test_abandoned_requests_free_everything(real: Door) -> None:
    """The fixture checks pages and slots afterwards."""

    async def leave() -> None:
        async with httpx.AsyncClient(base_url=real.url, timeout=60, verify=False) as client:
            for _ in range(6):
                body = {"model": "tiny", "prompt": PROMPT, "max_tokens": 900, "stream": True,
                        "ignore_eos": True, "n": 2}  # fmt: skip
                async with client.stream("POST", COMPLETIONS, json=body) as response:
                    async for _ in response.aiter_bytes():
                        break

    asyncio.run(leave())


def test_lines_of_metrics_are_well_formed(real: Door) -> None:
    text = real.http.get("/metrics").text
    assert "nan" not in text.lower().replace("name", "")
    exposed = {line.split()[2] for line in text.splitlines() if line.startswith("# TYPE")}
    for metric in set(metrics.ALL) - set(metrics.MESH) - set(metrics.OPTIONAL):
        name = metric.full_name + ("_total" if metric.kind == "counter" else "")
        if metric.labels[:1] == ("model_name",):
            assert name in exposed, name
