"""Where requests go for the sake of what is cached there, and when load wins."""

import asyncio
import random
from dataclasses import dataclass

import pytest

from expertmesh.actors.attention.messages import GenerateRequest, SamplingParams
from expertmesh.deploy import replica_link
from expertmesh.deploy.prefix_index import (
    FORGET_SECONDS,
    MOST_HOLDERS,
    MOST_PAGES,
    SLACK_REQUESTS,
    SLACK_SHARE,
    PrefixIndex,
)
from tests.support.client_scene import Scene, out, request, run, until

PAGE = 64


@dataclass
class Link:
    """As much of a replica's link as the index looks at."""

    holder: str
    running: int = 0
    load: float = 0.0


def asking(ids: list[int], tenant: str = "", session: str = "") -> GenerateRequest:
    params = SamplingParams(max_tokens=1)
    return GenerateRequest("x", ids, params, tenant=tenant, session=session)


def text(seed: int, tokens: int) -> list[int]:
    return random.Random(seed).choices(range(1000), k=tokens)


class TestChoice:
    def setup_method(self) -> None:
        self.now = 0.0
        self.index = PrefixIndex(clock=lambda: self.now)
        self.a, self.b = Link("a"), Link("b")

    def choose(self, one: GenerateRequest) -> tuple[str, int, str]:
        found = self.index.choose([self.a, self.b], self.index.route(one))
        return found.link.holder, found.known, found.why

    def place(self, one: GenerateRequest, holder: str) -> None:
        self.index.placed(self.index.route(one), holder)

    def test_the_deepest_known_prefix_wins(self) -> None:
        shared = text(0, 2 * PAGE)
        self.place(asking(shared + text(1, 3 * PAGE)), "a")
        self.place(asking(shared + text(2, 2 * PAGE)), "b")
        assert self.choose(asking(shared + text(1, 9 * PAGE))) == ("a", 4 * PAGE, "prefix")
        assert self.choose(asking(shared + text(2, 9 * PAGE))) == ("b", 3 * PAGE, "prefix")
        assert self.choose(asking(text(9, 5 * PAGE))) == ("a", 0, "load")

    def test_whole_pages_count_and_the_last_token_is_computed(self) -> None:
        ids = text(0, 3 * PAGE)
        self.place(asking(ids), "b")  # its third page ends with the prompt
        assert self.choose(asking(ids)) == ("b", 2 * PAGE, "prefix")
        assert self.choose(asking([*ids, 1])) == ("b", 2 * PAGE, "prefix")
        self.place(asking([*ids, 1]), "b")
        assert self.choose(asking([*ids, 1])) == ("b", 3 * PAGE, "prefix")
        assert self.choose(asking(ids[:PAGE])) == ("a", 0, "load")
        assert self.choose(asking([5])) == ("a", 0, "load")

    def test_another_first_page_is_another_prompt(self) -> None:
        ids = text(0, 4 * PAGE)
        self.place(asking(ids), "b")
        assert self.choose(asking([ids[0] + 1, *ids[1:]]))[2] == "load"
        # What follows is the same, but was computed after something else.
        assert self.choose(asking(ids[PAGE:]))[2] == "load"

    def test_tenants_do_not_meet(self) -> None:
        ids = text(0, 4 * PAGE)
        self.place(asking(ids, tenant="t/1", session="s"), "b")
        assert self.choose(asking(ids, tenant="t/2", session="s")) == ("a", 0, "load")
        assert self.choose(asking(ids, tenant="t/1"))[0] == "b"

    def test_a_session_returns_to_where_it_was_last(self) -> None:
        self.place(asking(text(0, 9), session="s"), "b")
        assert self.choose(asking(text(1, 9), session="s")) == ("b", 8, "session")
        self.place(asking(text(0, 9), session="s"), "a")
        self.b.running = self.b.load = 0
        self.a.running = self.a.load = SLACK_REQUESTS
        assert self.choose(asking(text(1, 5000), session="s")) == ("a", 4999, "session")

    def test_load_counts_in_tokens_to_be_computed(self) -> None:
        ids = text(0, 10 * PAGE + 1)
        self.place(asking(ids), "b")
        self.b.load = 9.5  # a long prompt in line there takes less than computing this one here
        assert self.choose(asking(ids))[0] == "b"
        self.b.load = 10.5
        assert self.choose(asking(ids)) == ("a", 0, "spread")

    @pytest.mark.parametrize("least", [0, 3, 20, 100])
    def test_the_holder_may_have_so_many_requests_more(self, least: int) -> None:
        ids = text(0, 512 * PAGE)
        self.place(asking(ids), "b")
        slack = max(SLACK_REQUESTS, SLACK_SHARE * least)
        self.a.running = self.a.load = least
        self.b.running = self.b.load = int(least + slack)
        assert self.choose(asking(ids))[2] == "prefix"
        self.b.running += 1
        assert self.choose(asking(ids)) == ("a", 0, "spread")

    def test_what_nobody_used_for_long_is_forgotten(self) -> None:
        ids = text(0, 3 * PAGE)
        self.place(asking(ids, session="s"), "b")
        self.now = FORGET_SECONDS - 1
        assert self.choose(asking(ids))[0] == "b"
        self.now = FORGET_SECONDS + 1
        assert self.choose(asking(ids, session="s")) == ("a", 0, "load")

    def test_holders_that_are_gone_mean_nothing(self) -> None:
        ids = text(0, 3 * PAGE)
        self.place(asking(ids), "gone")
        assert self.choose(asking(ids)) == ("a", 0, "load")

    def test_of_equals_the_one_that_has_waited_longest(self) -> None:
        """Prompts that come one by one must not all fill the first one's cache."""
        links = [Link(name) for name in "abc"]
        found = []
        for seed in range(6):
            route = self.index.route(asking(text(seed, PAGE + 1)))
            link = self.index.choose(links, route).link
            self.index.placed(route, link.holder)
            found.append(link.holder)
        assert found == ["a", "b", "c"] * 2


class TestBounds:
    def test_entries(self) -> None:
        """The oldest prompts go first, and of a prompt its end."""
        index, b = PrefixIndex(entries=10), [Link("b")]
        for seed in range(50):
            index.placed(index.route(asking(text(seed, 4 * PAGE + 1))), "b")
            assert len(index._holders) <= 10
        known = [
            index.choose(b, index.route(asking(text(seed, 4 * PAGE + 1)))).known // PAGE
            for seed in (49, 48, 47, 46)
        ]
        assert known == [4, 4, 2, 0]

    def test_pages_and_holders(self) -> None:
        index, long = PrefixIndex(), asking(text(0, (MOST_PAGES + 50) * PAGE))
        assert len(index.route(long).pages) == MOST_PAGES
        for number in range(3 * MOST_HOLDERS):
            index.placed(index.route(asking(text(0, 2 * PAGE))), str(number))
        (holders,) = set(index._holders.values())
        assert holders == tuple(str(n) for n in reversed(range(2 * MOST_HOLDERS, 3 * MOST_HOLDERS)))

    def test_one_popular_prefix_does_not_take_one_replica(self) -> None:
        """All requests share a prompt's first 100 pages and stay: nobody gets far ahead."""
        index, links = PrefixIndex(), [Link(name) for name in "abcd"]
        shared = text(0, 100 * PAGE)
        for seed in range(200):
            route = index.route(asking(shared + text(seed, PAGE)))
            link = index.choose(links, route).link
            index.placed(route, link.holder)
            link.running += 1
            link.load += 1
            counts = [one.running for one in links]
            bound = max(SLACK_REQUESTS, SLACK_SHARE * min(counts))
            assert max(counts) <= min(counts) + bound + 1
        assert min(one.running for one in links) >= 40


class TestClient:
    @pytest.fixture(autouse=True)
    def quick(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(replica_link, "LOOK_SECONDS", 0.02)

    def test_prompts_that_begin_alike_meet_and_others_spread(self) -> None:
        async def scenario(scene: Scene) -> None:
            placed: list[str] = []
            scene.client.placed = placed.append
            tasks = await scene.ask("a", prompt=3 * PAGE)
            holder = scene.owner("a")
            assert holder is not None
            holder.say(out("a", 1))
            await until(lambda: all(not link.queued for link in scene.client._links.values()))
            tasks += await scene.ask("b", prompt=4 * PAGE)  # [1] * n: it begins like a
            assert scene.owner("b") is holder
            (link,) = [link for link in scene.client._links.values() if link.queued]
            assert link.queued == 4 * PAGE - 2 * PAGE, "what is known there is not computed"
            tasks += await scene.ask("c")
            assert scene.owner("c") is not holder
            assert placed == ["load", "prefix", "load"]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            assert scene.nothing_left()

        run(scenario)

    def test_a_lost_holder_is_no_reason_to_wait(self) -> None:
        async def scenario(scene: Scene) -> None:
            (task,) = await scene.ask("a", prompt=3 * PAGE)
            holder = scene.owner("a")
            assert holder is not None
            holder.dead.set()
            other = next(one for one in scene.replicas if one is not holder)
            await until(lambda: len(other.received) == 1)
            other.say(out("a~1", 7, finish="stop"))
            assert await task == [7]
            (again,) = await scene.ask("b", prompt=3 * PAGE)
            other.say(out("b", 8, finish="stop"))
            assert await again == [8] and scene.owner("b") is other

        run(scenario)

    def test_the_session_of_another_tenant_is_another(self) -> None:
        index = PrefixIndex()
        one = request("x", prompt=9)
        assert index.route(one).session is None
        keys = {
            index.route(asking([1], tenant=tenant, session=name)).session
            for tenant in ("a/", "b/")
            for name in ("s", "t")
        }
        assert len(keys) == 4
