"""The client over attention actors that come and go; they are plain objects, no Ray is started."""

import asyncio
from typing import Any

import pytest

from expertmesh.actors.attention.messages import (
    EngineBusy,
    QuotaExceeded,
    RequestRefused,
)
from expertmesh.actors.process import Health
from expertmesh.deploy import ray_client, replica_link
from expertmesh.deploy.engine_client import EngineUnavailable
from expertmesh.deploy.openai.telemetry import Telemetry
from tests.support.client_scene import DRAIN_S, Scene, collect, out, request, run, until
from tests.support.fake_replica import FakeReplica


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replica_link, "LOOK_SECONDS", 0.02)
    monkeypatch.setattr(replica_link, "ANSWER_SECONDS", 0.3)
    monkeypatch.setattr(ray_client, "BUSY_SECONDS", 0.02)


class TestDelivery:
    def test_outputs_reach_their_requests(self) -> None:
        async def scenario(scene: Scene) -> None:
            first, second = await scene.ask("a", "b")  # one on each
            a, b = scene.owner("a"), scene.owner("b")
            assert a is not None and b is not None and a is not b
            a.say(out("a", 1), out("stranger", 9))
            b.say(out("b", 5))
            a.say(out("a", 2, finish="stop"))
            b.say(out("b", 6, 7, finish="length"))
            assert (await first, await second) == ([1, 2], [5, 6, 7])
            stats = await scene.client.stats()
            assert {name: one and one.running for name, one in stats.items()} == {"r0": 1, "r1": 1}
            assert not a.aborted and not b.aborted

        run(scenario)

    def test_requests_of_one_turn_share_a_call(self) -> None:
        async def scenario(scene: Scene) -> None:
            tasks = await scene.ask(*[str(n) for n in range(10)])
            assert [len(replica.received) for replica in scene.replicas] == [5, 5]
            assert [replica.calls for replica in scene.replicas] == [1, 1]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await until(lambda: sum(len(replica.aborted) for replica in scene.replicas) == 10)

        run(scenario)

    def test_prompts_in_line_count_until_their_first_token(self) -> None:
        async def scenario(scene: Scene) -> None:
            (long,) = await scene.ask("long", prompt=640)
            busy = scene.owner("long")
            assert busy is not None
            shorts = await scene.ask("s0", "s1", "s2")
            assert len(busy.received) == 1  # the other one took all three
            busy.say(out("long", 1))
            await until(lambda: all(link.queued < 10 for link in scene.client._links.values()))
            shorts += await scene.ask("s3", "s4")
            assert [one.request_id for one in busy.received] == ["long", "s3", "s4"]
            for task in [long, *shorts]:
                task.cancel()
            await asyncio.gather(long, *shorts, return_exceptions=True)

        run(scenario)

    @pytest.mark.parametrize(
        ("answer", "error"),
        [
            (("refused", "needs 9 pages", "max_tokens"), RequestRefused),
            (("quota", "there are 3 already", "session_id"), QuotaExceeded),
            (("busy", "full", ""), EngineBusy),
            (("failed", "rank 1 is gone", ""), EngineUnavailable),
        ],
    )
    def test_refusals_keep_their_kind(self, answer: Any, error: type[Exception]) -> None:
        async def scenario(scene: Scene) -> None:
            for replica in scene.replicas:
                replica.answer = answer
            with pytest.raises(error, match=answer[1]) as caught:
                await collect(scene.client, "a")
            if isinstance(caught.value, RequestRefused):
                assert caught.value.field == answer[2]

        run(scenario)

    def test_an_id_in_use_is_refused(self) -> None:
        async def scenario(scene: Scene) -> None:
            (first,) = await scene.ask("a")
            with pytest.raises(RequestRefused, match="already in use"):
                await collect(scene.client, "a")
            scene.owner("a").say(out("a", 1, finish="stop"))  # type: ignore[union-attr]
            assert await first == [1]

        run(scenario)

    def test_an_abort_ends_a_request_wherever_it_is(self) -> None:
        async def scenario(scene: Scene) -> None:
            async def ends(name: str) -> list[Any]:
                return [one.finish_reason async for one in scene.client.generate(request(name))]

            task = asyncio.create_task(ends("a"))
            await until(lambda: scene.owner("a") is not None)
            scene.client.abort("a")
            scene.client.abort("nobody")
            assert await task == ["abort"]
            only = scene.replicas[0]
            await until(lambda: only.aborted == ["a"])
            only.say(out("a", finish="abort"))  # the replica's own word comes too late to matter
            only.dead.set()
            await until(lambda: scene.links() == {"r0": "down"})
            waiting = asyncio.create_task(ends("b"))
            await until(lambda: "b" in scene.client._requests)
            scene.client.abort("b")
            assert await waiting == ["abort"]

        run(scenario, replicas=1)

    def test_a_sampled_request_has_a_seed_before_it_leaves(self) -> None:
        async def scenario(scene: Scene) -> None:
            tasks = await scene.ask("a", "b", temperature=0.7)
            tasks += await scene.ask("c", temperature=0.7, seed=5)
            tasks += await scene.ask("d")
            seeds = [scene.attempt(name).params.seed for name in "abcd"]
            assert seeds[0] is not None and seeds[1] is not None and seeds[0] != seeds[1]
            assert seeds[2:] == [5, None]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

        run(scenario)


class TestWaiting:
    def test_for_a_replica_that_comes_back(self) -> None:
        async def scenario(scene: Scene) -> None:
            (task,) = await scene.ask("a")
            only = scene.replicas[0]
            only.say(out("a", 1))
            await until(lambda: scene.client._requests["a"].ids == [1])
            only.dead.set()
            await until(lambda: scene.links() == {"r0": "down"})
            assert scene.client.ready() == (True, "")  # for a moment: it will be served
            late = asyncio.create_task(collect(scene.client, "b"))
            await asyncio.sleep(0.05)
            fresh = scene.mesh.replicas["r0.2"] = FakeReplica()
            del scene.mesh.replicas["r0"]
            scene.mesh.publish(**{"r0.2": "r0"})
            await until(lambda: len(fresh.received) == 2)
            fresh.say(out("a~1", 2, finish="stop"), out("b", 3, finish="stop"))
            assert (await task, await late) == ([1, 2], [3])
            assert list(await scene.client.stats()) == ["r0"]  # the seat, not the process

        run(scenario, replicas=1)

    def test_but_not_for_ever(self) -> None:
        async def scenario(scene: Scene) -> None:
            (task,) = await scene.ask("a")
            scene.replicas[0].dead.set()
            with pytest.raises(EngineUnavailable, match=r"no replica within 0.6 s.*died"):
                await task
            assert not scene.client.ready()[0]
            with pytest.raises(EngineUnavailable, match="r0: The actor died unexpectedly"):
                await collect(scene.client, "b")

        run(scenario, replicas=1)

    def test_a_client_that_leaves_while_it_waits_leaves_nothing(self) -> None:
        async def scenario(scene: Scene) -> None:
            (task,) = await scene.ask("a")
            scene.replicas[0].dead.set()
            await until(lambda: not scene.client._attempts)
            late = asyncio.create_task(collect(scene.client, "b"))
            await asyncio.sleep(0.02)
            for one in (task, late):
                one.cancel()
            await asyncio.gather(task, late, return_exceptions=True)
            assert scene.nothing_left()
            fresh = scene.mesh.replicas["r1"] = FakeReplica()
            scene.mesh.publish()
            await until(lambda: scene.links().get("r1") == "up")
            await asyncio.sleep(0.05)
            assert not fresh.received

        run(scenario, replicas=1)

    def test_while_the_mesh_does_not_serve(self) -> None:
        async def scenario(scene: Scene) -> None:
            (task,) = await scene.ask("a")
            owner = scene.owner("a")
            assert owner is not None
            scene.mesh.publish(serving=False, reason="7 experts have no room")
            await until(lambda: not scene.client.ready()[0])
            assert scene.client.ready() == (False, "7 experts have no room")
            with pytest.raises(EngineUnavailable, match="7 experts have no room"):
                await collect(scene.client, "b")
            await asyncio.sleep(0.05)
            assert not task.done() and not owner.aborted
            scene.mesh.publish()
            await until(lambda: scene.client.ready()[0])
            owner.say(out("a", 1, finish="stop"))
            assert await task == [1]

        run(scenario)

    def test_ready_is_red_when_the_patience_is_over_and_green_again(self) -> None:
        async def scenario(scene: Scene) -> None:
            for replica in scene.replicas:
                replica.health_answer = Health(False, "waits for epoch 2")
            await until(lambda: set(scene.links().values()) == {"held"})
            assert scene.client.ready()[0]
            await until(lambda: not scene.client.ready()[0])
            assert scene.client.ready()[1] == "r0: waits for epoch 2; r1: waits for epoch 2"
            scene.replicas[1].health_answer = Health(True)
            await until(lambda: scene.client.ready()[0])

        run(scenario)


class TestDirectory:
    def test_newcomers_are_used_and_leavers_drain(self) -> None:
        async def scenario(scene: Scene) -> None:
            short, long = await scene.ask("short", "long")
            leaver = scene.owner("short")
            assert leaver is scene.owner("long")
            fresh = scene.mesh.replicas["new"] = FakeReplica()
            del scene.mesh.replicas["r0"]
            scene.mesh.publish()
            await until(lambda: scene.links() == {"new": "up"})
            (third,) = await scene.ask("third")
            assert [one.request_id for one in fresh.received] == ["third"]
            leaver.say(out("short", 1, finish="stop"), out("long", 1))  # type: ignore[union-attr]
            assert await short == [1]
            await until(lambda: len(fresh.received) == 2)  # the time to drain is over
            assert fresh.received[1].resume_ids == [1]
            fresh.say(out("long~1", 2, finish="stop"), out("third", 3, finish="stop"))
            assert (await long, await third) == ([1, 2], [3])
            await until(lambda: not scene.client._leaving)

        run(scenario, replicas=1)

    def test_the_last_one_to_leave_keeps_what_it_has(self) -> None:
        async def scenario(scene: Scene) -> None:
            (task,) = await scene.ask("a")
            leaver = scene.replicas[0]
            scene.mesh.replicas.clear()
            scene.mesh.publish()
            await asyncio.sleep(2 * DRAIN_S)
            assert not leaver.aborted
            assert scene.client.ready() == (False, "there is no attention replica")
            leaver.say(out("a", 1, finish="stop"))
            assert await task == [1]
            await until(lambda: not scene.client._leaving)

        run(scenario, replicas=1)

    def test_without_the_directory_what_is_known_serves_on(self) -> None:
        async def scenario(scene: Scene) -> None:
            scene.mesh.readable = False
            scene.mesh.publish()  # ends the read that is under way
            await asyncio.sleep(0.1)
            (task,) = await scene.ask("a")
            scene.owner("a").say(out("a", 1, finish="stop"))  # type: ignore[union-attr]
            assert await task == [1]
            scene.mesh.readable = True
            scene.mesh.publish(serving=False, reason="back, and red")
            await until(lambda: scene.client.ready() == (False, "back, and red"))

        run(scenario)

    def test_stopping_ends_every_request(self) -> None:
        async def scenario(scene: Scene) -> None:
            tasks = await scene.ask("a", "b")
            await scene.client.stop()
            for task in tasks:
                with pytest.raises(EngineUnavailable, match="stopping"):
                    await task

        run(scenario)

    def test_a_replica_that_is_down_is_seen_in_the_metrics(self) -> None:
        async def scenario(scene: Scene) -> None:
            scene.replicas[0].dead.set()
            await until(lambda: scene.links()["r0"] == "down")
            stats = await scene.client.stats()
            assert stats["r0"] is None and stats["r1"] is not None
            lines = Telemetry("m", lambda: 0.0).exposition(stats).decode().splitlines()
            series = [line for line in lines if 'engine="r0"' in line]
            assert len(series) == 1 and series[0].startswith("expertmesh_engine_up{")
            assert series[0].endswith(" 0.0")
            assert any('engine="r1"' in line and line.endswith(" 1.0") for line in lines)

        run(scenario)
