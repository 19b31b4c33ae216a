"""Both golden checkpoints through the running server: HTTP, Ray, two expert actors, float32."""

import asyncio
import base64
import io
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from tests.support.golden import GOLDEN
from tests.support.http_server import free_port
from tests.support.server_process import server_process

TOLERANCE = {"kimi_k3-tiny": 2e-2, "kimi_linear-tiny": 1e-4}
START = 240.0
STREAMS = 32


@pytest.fixture(scope="module", params=sorted(TOLERANCE))
def served(request: pytest.FixtureRequest) -> Iterator[tuple[Path, str]]:
    folder, port = GOLDEN / request.param, free_port()
    url = f"http://127.0.0.1:{port}"
    with server_process(folder, "--port", str(port), "--dtype", "float32") as server:
        server.wait_ready(url, START)
        yield folder, url


def complete(url: str, model: str, **body: Any) -> dict[str, Any]:
    answer = httpx.post(f"{url}/v1/completions", json={"model": model} | body, timeout=60)
    assert answer.status_code == 200, answer.text
    choice: dict[str, Any] = answer.json()["choices"][0]
    return choice


@pytest.mark.timeout(400)
class TestGolden:
    def test_greedy_ids_and_routed_experts(self, served: tuple[Path, str]) -> None:
        folder, url = served
        expected = json.loads((folder / "expected.json").read_text())
        prompt, greedy = expected["prompt_ids"], expected["greedy_ids"]
        choice = complete(
            url, folder.name, prompt=prompt, max_tokens=len(greedy), temperature=0,
            ignore_eos=True, return_token_ids=True, return_routed_experts=True,
        )  # fmt: skip
        assert choice["prompt_token_ids"] == prompt
        assert choice["token_ids"] == greedy
        routed = np.load(io.BytesIO(base64.b64decode(choice["routed_experts"])))
        for place, layer in enumerate(sorted(expected["routed_experts"], key=int)):
            assert routed[: len(prompt), place].tolist() == expected["routed_experts"][layer]

    def test_log_probabilities_of_the_prompt(self, served: tuple[Path, str]) -> None:
        """Row by row the 20 most likely ids, against the golden logits' softmax."""
        folder, url = served
        prompt = json.loads((folder / "expected.json").read_text())["prompt_ids"]
        logits_TV = load_file(folder / "expected-logits.safetensors")["logits"]
        expected_TV = torch.log_softmax(logits_TV, -1)
        choice = complete(
            url, folder.name, prompt=prompt, echo=True, max_tokens=0, logprobs=20,
            return_tokens_as_token_ids=True,
        )  # fmt: skip
        tops = choice["logprobs"]["top_logprobs"]
        assert len(tops) == len(prompt)
        assert tops[0] is None
        for row, top in enumerate(tops[1:]):
            assert len(top) >= 20
            for name, logprob in top.items():
                token = int(name.removeprefix("token_id:"))
                assert abs(logprob - expected_TV[row, token].item()) <= TOLERANCE[folder.name]

    def test_concurrent_answers_are_those_given_alone(self, served: tuple[Path, str]) -> None:
        folder, url = served
        rng = random.Random(7)
        prompts = [
            [rng.randrange(3, 320) for _ in range(rng.randrange(1, 140))] for _ in range(STREAMS)
        ]

        def body(prompt: list[int]) -> dict[str, Any]:
            return {"model": folder.name, "prompt": prompt, "temperature": 0, "ignore_eos": True,
                    "max_tokens": 8 + len(prompt) % 9, "return_token_ids": True}  # fmt: skip

        async def together() -> list[list[int]]:
            async with httpx.AsyncClient(base_url=url, timeout=120) as client:
                posts = [client.post("/v1/completions", json=body(p)) for p in prompts]
                answers = await asyncio.gather(*posts)
            return [answer.json()["choices"][0]["token_ids"] for answer in answers]

        alone = [complete(url, **body(prompt))["token_ids"] for prompt in prompts]
        assert asyncio.run(together()) == alone
