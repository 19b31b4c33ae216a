"""Starts ExpertMesh in one of its shapes: a client for it and a way to stop it.

Called, and the client used, on a running event loop.
"""

import asyncio
import os
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

from expertmesh.actors.attention.loop import EngineLoop
from expertmesh.actors.model.loading import LoadSettings
from expertmesh.deploy.engine_client import EngineClient, LocalEngineClient
from expertmesh.deploy.one_process import start_local
from tests.bench import engines

Started = tuple[EngineClient, Callable[[], None]]


def _load(checkpoint: Path) -> LoadSettings:
    return LoadSettings(model=checkpoint, dtype="float32", expert_cache_bytes=engines.CACHE_BYTES)


def one_process(checkpoint: Path, expert_actors: int, threads: int) -> Started:
    """`expertmesh serve --expert-actors 0` without its HTTP."""
    server = start_local(_load(checkpoint), engines.settings(), threads)
    return server.client, server.stop


def bare_mesh(checkpoint: Path, expert_actors: int, threads: int) -> Started:
    """Two tiers without Ray: what the exchange alone costs."""
    stack = ExitStack()
    engine = stack.enter_context(engines.mesh_engine(checkpoint, expert_actors, threads))
    client = LocalEngineClient()
    loop = EngineLoop(engine, client.publish)
    client.attach(loop)
    loop.start()
    stack.callback(loop.stop)
    return client, stack.close


def two_tier(
    checkpoint: Path, expert_actors: int, threads: int, *, ping_pong: bool = False
) -> Started:
    """`expertmesh serve` without its HTTP: the mesh on a local Ray, its client here."""
    os.environ["RAY_ADDRESS"] = "local"  # never join a cluster that happens to run here
    import ray

    from expertmesh.cluster import launch
    from expertmesh.cluster.directory import Directory
    from expertmesh.cluster.settings import ClusterSettings, WatchSettings
    from expertmesh.deploy.ray_client import RayEngineClient

    settings = ClusterSettings(
        load=_load(checkpoint),
        engine=engines.settings(ping_pong=ping_pong),
        expert_actors=expert_actors,
        threads_per_actor=threads,
        # Other systems' turns may keep the processors from answering a health call.
        watch=WatchSettings(silence_s=30.0),
        name="bench",
    )
    mesh = launch.start(settings)

    async def directory(seen: int) -> Directory:
        return await asyncio.to_thread(mesh.directory, seen, 5.0)

    def find(name: str) -> Any:
        return ray.get_actor(name, namespace=settings.namespace)

    client = RayEngineClient(directory, find)
    client.start()

    def stop() -> None:
        mesh.stop()
        ray.shutdown()

    return client, stop


SHAPES: dict[str, Callable[[Path, int, int], Started]] = {
    "one_process": one_process,
    "bare_mesh": bare_mesh,
    "two_tier": two_tier,
    "two_tier_ping_pong": partial(two_tier, ping_pong=True),
}


async def start(shape: str, checkpoint: Path, expert_actors: int, threads: int) -> Started:
    """Raises TimeoutError when the system does not become ready."""
    client, stop = SHAPES[shape](checkpoint, expert_actors, threads)
    for _ in range(600):
        ready, reason = client.ready()
        if ready:
            return client, stop
        await asyncio.sleep(0.1)
    stop()
    raise TimeoutError(reason)
