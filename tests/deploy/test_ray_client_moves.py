"""Requests that outlive their replicas, and those that may be why replicas are lost."""

import asyncio

import pytest

from expertmesh.actors.attention.messages import (
    TokenLogprobs,
    TokenOutput,
)
from expertmesh.actors.process import Health
from expertmesh.deploy import ray_client, replica_link
from expertmesh.deploy.engine_client import EngineUnavailable, at_the_end
from tests.support.client_scene import HOLD_S, Scene, collect, out, request, run, until
from tests.support.fake_replica import FakeReplica


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replica_link, "LOOK_SECONDS", 0.02)
    monkeypatch.setattr(replica_link, "ANSWER_SECONDS", 0.3)
    monkeypatch.setattr(ray_client, "BUSY_SECONDS", 0.02)


async def lose(scene: Scene, victim: FakeReplica, how: str) -> None:
    if how == "dies":
        victim.dead.set()
    elif how == "falls silent":
        victim.frozen = True
    elif how == "breaks its stream":
        victim.broken.set()
    elif how == "has lost them":
        victim.health_answer = Health(False, "a new engine", lost=True)
    elif how == "engine fails":
        victim.say(out("a", finish="error", error="exchange broke", lost=True))
    elif how == "aborts them":
        victim.say(out("a", finish="abort"))
    elif how == "leaves":
        del scene.mesh.replicas[next(n for n, r in scene.mesh.replicas.items() if r is victim)]
        scene.mesh.publish()
    else:
        raise AssertionError(how)


LOSSES = [
    "dies", "falls silent", "breaks its stream", "has lost them", "engine fails", "aborts them",
    "leaves",
]  # fmt: skip


class TestMoves:
    @pytest.mark.parametrize("how", LOSSES)
    def test_a_request_goes_on_after_its_last_token(self, how: str) -> None:
        async def scenario(scene: Scene) -> None:
            (task,) = await scene.ask("a", temperature=0.9)
            first = scene.owner("a")
            assert first is not None
            original = scene.attempt("a")
            first.say(out("a", 1, 2))
            first.say(out("a", 3))
            await until(lambda: scene.client._requests["a"].ids == [1, 2, 3])
            await lose(scene, first, how)
            await until(lambda: scene.owner("a~1") is not None)
            again = scene.attempt("a~1")
            assert again.resume_ids == [1, 2, 3]
            assert (again.prompt_ids, again.params) == (original.prompt_ids, original.params)
            assert again.params.seed is not None
            # What the abandoned attempt still says is nobody's.
            first.say(out("a", 4), out("a", finish="stop"))
            scene.owner("a~1").say(out("a~1", 4, finish="length"))  # type: ignore[union-attr]
            assert await task == [1, 2, 3, 4]
            first.frozen = False
            if not first.dead.is_set():
                await until(lambda: first.aborted == ["a"])  # it must not compute on for nobody

        run(scenario)

    @pytest.mark.parametrize("how", ["dies", "falls silent", "has lost them"])
    def test_lost_while_it_was_being_sent(self, how: str) -> None:
        async def scenario(scene: Scene) -> None:
            for replica in scene.replicas:
                replica.frozen = True
            task = asyncio.create_task(collect(scene.client, "a"))
            await until(lambda: bool(scene.client._attempts))
            link = scene.client._attempts["a"].link
            assert link is not None
            first = scene.mesh.replicas[link.seat]
            (other,) = [replica for replica in scene.replicas if replica is not first]
            other.frozen = False
            await lose(scene, first, how)
            await until(lambda: bool(other.received))
            assert (other.received[0].request_id, other.received[0].resume_ids) == ("a~1", [])
            other.say(out("a~1", 7, finish="stop"))
            assert await task == [7]
            first.frozen = False
            if how == "falls silent":  # it takes the request after all, for nobody
                await until(lambda: first.aborted.count("a") >= 1 and bool(first.received))

        run(scenario)

    def test_logprobs_and_routing_are_those_of_the_new_tokens(self) -> None:
        async def scenario(scene: Scene) -> None:
            entry = TokenLogprobs(1, -0.5, 1, [])
            outputs: list[TokenOutput] = []

            async def read() -> None:
                async for output in scene.client.generate(request("a")):
                    outputs.append(output)

            task = asyncio.create_task(read())
            await until(lambda: scene.owner("a") is not None)
            first = scene.owner("a")
            assert first is not None
            first.say(out("a", 1, logprobs=[entry], prompt_logprobs=[None], routed_experts=b"pp"))
            await until(lambda: len(outputs) == 1)
            first.dead.set()
            await until(lambda: scene.owner("a~1") is not None)
            second = scene.owner("a~1")
            assert second is not None
            second.say(out("a~1", 2, finish="stop", logprobs=[entry], routed_experts=b"a"))
            await task
            assert [one.logprobs for one in outputs] == [[entry], [entry]]
            assert b"".join(one.routed_experts or b"" for one in outputs) == b"ppa"

        run(scenario)

    def test_unread_outputs_survive_the_loss(self) -> None:
        """A reader that only wants the whole answer has read nothing when the replica dies."""

        async def scenario(scene: Scene) -> None:
            async def whole() -> list[TokenOutput]:
                return [one async for one in scene.client.generate(request("a"), at_the_end)]

            task = asyncio.create_task(whole())
            await until(lambda: scene.owner("a") is not None)
            first = scene.owner("a")
            assert first is not None
            first.say(out("a", 1))
            first.say(out("a", 2))
            await until(lambda: len(scene.client._requests["a"].ids) == 2)
            first.dead.set()
            await until(lambda: scene.owner("a~1") is not None)
            scene.owner("a~1").say(out("a~1", 3, finish="stop"))  # type: ignore[union-attr]
            assert [one.token_ids for one in await task] == [[1], [2, 3]]

        run(scenario)

    def test_only_its_own_requests_move(self) -> None:
        async def scenario(scene: Scene) -> None:
            tasks = dict(zip("ab", await scene.ask("a", "b"), strict=True))
            dead, alive = scene.replicas
            mine, other = dead.received[0].request_id, alive.received[0].request_id
            dead.dead.set()
            await until(lambda: len(alive.received) == 2)
            assert alive.received[1].request_id == f"{mine}~1"
            assert scene.client.ready() == (True, "")
            alive.say(out(other, 3, finish="stop"), out(f"{mine}~1", 4, finish="stop"))
            assert (await tasks[other], await tasks[mine]) == ([3], [4])

        run(scenario)

    def test_a_busy_replica_is_asked_again_for_what_has_begun(self) -> None:
        async def scenario(scene: Scene) -> None:
            (task,) = await scene.ask("a")
            first = scene.owner("a")
            (other,) = [replica for replica in scene.replicas if replica is not first]
            assert first is not None
            other.answer = ("busy", "4096 requests are waiting", "")
            first.dead.set()
            await until(lambda: len(other.received) >= 3)
            other.answer = None
            await until(lambda: len(scene.client._attempts) == 1)
            await asyncio.sleep(0.05)
            other.say(out(other.received[-1].request_id, 5, finish="stop"))
            assert await task == [5]

        run(scenario)

    def test_a_held_replica_keeps_its_requests_and_gets_no_new_ones(self) -> None:
        async def scenario(scene: Scene) -> None:
            (task,) = await scene.ask("a")
            first = scene.owner("a")
            (other,) = [replica for replica in scene.replicas if replica is not first]
            assert first is not None
            first.health_answer = Health(False, "waits for epoch 4")
            await until(lambda: "held" in scene.links().values())
            later = await scene.ask("b", "c")
            assert [one.request_id for one in other.received] == ["b", "c"]
            first.health_answer = Health(True)
            await until(lambda: "held" not in scene.links().values())
            first.say(out("a", 1, finish="stop"))
            other.say(out("b", 2, finish="stop"), out("c", 3, finish="stop"))
            assert [await one for one in [task, *later]] == [[1], [2], [3]]
            assert not first.aborted

        run(scenario)


class TestSuspects:
    def test_a_request_that_kills_is_given_up(self) -> None:
        async def scenario(scene: Scene) -> None:
            task = asyncio.create_task(collect(scene.client, "poison"))
            for number in range(3):
                name = f"poison~{number}" if number else "poison"
                await until(lambda name=name: scene.owner(name) is not None)  # type: ignore[misc]
                scene.owner(name).dead.set()  # type: ignore[union-attr]
            with pytest.raises(
                EngineUnavailable, match=r"3 replicas were lost .* r.: The actor di"
            ):
                await task
            assert sum(not replica.dead.is_set() for replica in scene.replicas) == 2

        run(scenario, replicas=5)

    def test_a_token_clears_it(self) -> None:
        async def scenario(scene: Scene) -> None:
            task = asyncio.create_task(collect(scene.client, "a"))
            for number in range(5):
                name = f"a~{number}" if number else "a"
                await until(lambda name=name: scene.owner(name) is not None)  # type: ignore[misc]
                owner = scene.owner(name)
                assert owner is not None
                owner.say(out(name, number))
                await until(lambda n=number: scene.client._requests["a"].ids == list(range(n + 1)))  # type: ignore[misc]
                owner.dead.set()
            await until(lambda: scene.owner("a~5") is not None)
            scene.owner("a~5").say(out("a~5", 5, finish="stop"))  # type: ignore[union-attr]
            assert await task == [0, 1, 2, 3, 4, 5]

        run(scenario, replicas=6)

    def test_suspects_are_tried_one_at_a_time(self) -> None:
        """Three requests lose two engines together; one of them is why. The others live."""

        async def scenario(scene: Scene) -> None:
            names = ["good", "poison", "fine"]
            tasks = dict(zip(names, await scene.ask(*names), strict=True))
            only = scene.replicas[0]

            def running() -> list[str]:
                return sorted(scene.client._attempts)

            for losses in (1, 2):
                lost = running()
                assert len(lost) == 3
                only.say(*[out(name, finish="error", error="crash", lost=True) for name in lost])
                more = 3 if losses == 1 else 1  # from now on, one at a time
                total = len(only.received) + more
                await until(lambda n=total: len(only.received) == n)  # type: ignore[misc]
            ended: list[str] = []
            while len(ended) < 3:
                await until(lambda: len(running()) >= 1 and running()[0] not in ended)
                await asyncio.sleep(0.02)
                (name,) = running()  # never two of them
                if not ended:
                    await asyncio.sleep(HOLD_S)  # being in line is not having no replica
                if name.startswith("poison"):
                    only.say(out(name, finish="error", error="crash", lost=True))
                else:
                    only.say(out(name, 8, finish="stop"))
                await until(lambda name=name: name not in scene.client._attempts)  # type: ignore[misc]
                ended.append(name)
            assert await tasks["good"] == await tasks["fine"] == [8]
            with pytest.raises(EngineUnavailable, match=r"given up.*crash"):
                await tasks["poison"]

        run(scenario, replicas=1)
