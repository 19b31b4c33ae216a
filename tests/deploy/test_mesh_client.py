"""The keeper as front doors ask it; it is a plain object that Ray's lookup returns."""

import asyncio
from collections.abc import Coroutine
from typing import Any

import pytest
import ray
from ray.exceptions import RayActorError, RayTaskError

from expertmesh.cluster.directory import Directory, ScaleError
from expertmesh.deploy import mesh_client
from expertmesh.deploy.engine_client import EngineUnavailable
from expertmesh.deploy.mesh_client import MeshClient
from tests.support.fake_replica import Method


class FakeKeeper:
    """Answers with `answer`, raises `problem`, or never answers."""

    def __init__(self) -> None:
        self.answer: Any = {"epoch": 1}
        self.problem: Exception | None = None
        self.silent = False
        self.asked: list[tuple[Any, ...]] = []

    def __getattr__(self, name: str) -> Method:
        async def call(*arguments: Any) -> Any:
            self.asked.append((name, *arguments))
            if self.silent:
                await asyncio.sleep(60)
            if self.problem is not None:
                raise self.problem
            return self.answer

        return Method(call)


@pytest.fixture
def keepers(monkeypatch: pytest.MonkeyPatch) -> list[FakeKeeper]:
    """Those alive; the last is found by name."""
    alive = [FakeKeeper()]

    def get_actor(name: str, namespace: str) -> FakeKeeper:
        assert (name, namespace) == ("x-mesh", "space")
        if not alive:
            raise ValueError("Failed to look up actor with name 'x-mesh'")
        return alive[-1]

    monkeypatch.setattr(ray, "get_actor", get_actor)
    monkeypatch.setattr(mesh_client, "ANSWER_SECONDS", 0.1)
    return alive


def ask(work: Coroutine[Any, Any, Any]) -> Any:
    return asyncio.run(asyncio.wait_for(work, 10))


def task_error(cause: Exception) -> RayTaskError:
    return RayTaskError("scale", "Traceback ...\nmore", cause)


def test_calls_and_their_arguments(keepers: list[FakeKeeper]) -> None:
    client = MeshClient("x-mesh", "space")
    assert ask(client.status()) == {"epoch": 1}
    ask(client.scale("+1", None, True))
    ask(client.rebalance(False))
    ask(client.routing_report())
    keepers[0].answer = b"npz"
    assert ask(client.record_routing(3.0, 7)) == b"npz"
    keepers[0].answer = Directory(4, (), True, "")
    assert ask(client.directory(3)).version == 4
    assert keepers[0].asked == [
        ("status",), ("scale", "+1", None, True), ("rebalance", False), ("routing_report",),
        ("record_routing", 3.0, 7), ("directory", 3, mesh_client.DIRECTORY_SECONDS),
    ]  # fmt: skip


def test_what_the_mesh_refuses_comes_through(keepers: list[FakeKeeper]) -> None:
    keepers[0].problem = task_error(ScaleError("experts 99: too many", "experts"))
    with pytest.raises(ScaleError, match="too many") as refused:
        ask(MeshClient("x-mesh", "space").scale(99, None, False))
    assert refused.value.field == "experts"
    keepers[0].problem = task_error(RuntimeError("the mesh is starting"))
    with pytest.raises(EngineUnavailable, match="x-mesh"):
        ask(MeshClient("x-mesh", "space").status())


def test_a_keeper_that_does_not_answer(keepers: list[FakeKeeper]) -> None:
    keepers[0].silent = True
    with pytest.raises(EngineUnavailable, match=r"no status within 0.1 s"):
        ask(MeshClient("x-mesh", "space").status())


def test_a_dead_keeper_is_looked_for_again(keepers: list[FakeKeeper]) -> None:
    client = MeshClient("x-mesh", "space")
    keepers[0].problem = RayActorError()
    with pytest.raises(EngineUnavailable, match="x-mesh"):
        ask(client.status())
    keepers.clear()
    with pytest.raises(EngineUnavailable, match="Failed to look up"):
        ask(client.status())
    keepers.append(FakeKeeper())
    assert ask(client.status()) == {"epoch": 1}
