"""Requests and answers never touch Ray's object store, however long they are and however full it
is: nothing of a user lies in it, and a small /dev/shm fails nobody."""

import asyncio
from collections.abc import Coroutine
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray
from ray._private.internal_api import node_stats

from expertmesh.actors.attention.messages import (
    GenerateRequest,
    RequestRefused,
    SamplingParams,
    TokenOutput,
)
from expertmesh.actors.attention.settings import EngineSettings
from expertmesh.actors.model.loading import LoadSettings
from expertmesh.cluster.launch import start
from expertmesh.cluster.settings import ClusterSettings
from expertmesh.deploy.ray_client import RayEngineClient
from tests.support.checkpoints import write_checkpoint
from tests.support.local_ray import cluster

__all__ = ["cluster"]  # a fixture


def objects() -> int:
    """Made in the store since it has been there."""
    (node,) = ray.nodes()
    reply = node_stats(node["NodeManagerAddress"], node["NodeManagerPort"], False)
    return int(reply.store_stats.cumulative_created_objects)


def fill() -> list[Any]:
    """More than the store holds; what is named stays."""
    total = int(ray.cluster_resources()["object_store_memory"])
    return [ray.put(np.ones(total // 8, np.uint8)) for _ in range(9)]


async def scenario(client: RayEngineClient, work: Coroutine[Any, Any, None]) -> None:
    client.start()
    try:
        async with asyncio.timeout(60):
            while not client.ready()[0]:
                await asyncio.sleep(0.02)
            await work
    finally:
        await client.stop()


async def answer(client: RayEngineClient, request: GenerateRequest) -> list[TokenOutput]:
    return [output async for output in client.generate(request)]


@pytest.mark.timeout(300)
def test_nothing_of_a_request_is_in_the_store(tmp_path: Path) -> None:
    model = write_checkpoint(tmp_path / "model", num_experts=4)
    mesh = start(
        ClusterSettings(
            load=LoadSettings(model=model, device="cpu"),
            engine=EngineSettings(pages=64, slots=4),
            expert_actors=1,
            name="stored",
        )
    )

    async def directory(seen: int) -> Any:
        return await asyncio.to_thread(mesh.directory, seen, 1.0)

    client = RayEngineClient(directory, partial(ray.get_actor, namespace=mesh.settings.namespace))
    greedy = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)
    telling = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=20)

    async def requests() -> None:
        short = GenerateRequest(request_id="short", prompt_ids=[5, 6, 7], params=greedy)
        expected = [output.token_ids for output in await answer(client, short)]
        made = objects()
        # An answer of some 200 KB, and a prompt of 400 KB that is found to be too long only there.
        told = GenerateRequest(request_id="told", prompt_ids=[300] * 800, params=telling)
        (first, *_) = await answer(client, told)
        assert first.prompt_logprobs is not None and len(first.prompt_logprobs) == 800
        long = GenerateRequest(request_id="long", prompt_ids=[5] * 400_000, params=greedy)
        with pytest.raises(RequestRefused):
            await answer(client, long)
        assert objects() == made
        held = await asyncio.to_thread(fill)
        assert objects() == made + len(held)  # what is put there is counted
        made = objects()
        again = [
            GenerateRequest(request_id=f"full-{i}", prompt_ids=[5, 6, 7], params=greedy)
            for i in range(8)
        ]
        for outputs in await asyncio.gather(*[answer(client, one) for one in again]):
            assert [output.token_ids for output in outputs] == expected
        assert objects() == made and held

    try:
        asyncio.run(scenario(client, requests()))
    finally:
        mesh.stop()
