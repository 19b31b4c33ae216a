"""Experts move and are copied while steps are made: same bits, one version per step."""

import random
import threading
import time
from functools import partial

import pytest
import torch

from expertmesh.actors.exchange.base import ExchangeError
from expertmesh.actors.exchange.mesh import MeshExchange
from expertmesh.actors.exchange.roster import Routing
from expertmesh.actors.exchange.settings import ExchangeSettings
from tests.actors.exchange.pool import Placement, Pool, company, walk
from tests.actors.exchange.toy import Shape, ThreadMesh, ToyBank, in_threads

LAYOUTS = ["direct", "exact", "padded", "mixed"]
LAYERS = (1, 2, 4)


def shape_of(layout: str = "direct", **more: object) -> Shape:
    settings = ExchangeSettings(layout=layout, deadline_s=20.0, max_rows=16)
    return Shape(layers=LAYERS, settings=settings, **more)  # type: ignore[arg-type]


def draw_placement(draw: random.Random, experts: int, actors: int) -> Placement:
    """Every expert on one to all of the actors."""
    placed: Placement = {}
    for layer in LAYERS:
        held: list[list[int]] = [[] for _ in range(actors)]
        for expert in range(experts):
            for actor in draw.sample(range(actors), draw.randint(1, actors)):
                held[actor].append(expert)
        placed[layer] = held
    return placed


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("actors", [1, 2, 4])
def test_any_placement_gives_the_same_bits(poison: None, layout: str, actors: int) -> None:
    draw = random.Random(actors)
    pool = Pool(shape_of(layout, num_experts=9, top_k=4))
    parts = [pool.shape.rows(37, 1), pool.shape.rows(6, 2)]
    with pool:
        for _ in range(5):
            pool.renew(draw_placement(draw, 9, actors))
            got, want = walk(pool.replicas[0], LAYERS, parts), pool.expected(parts)
            assert all(torch.equal(*pair) for pair in zip(got, want, strict=True))


class Mover:
    """Another routing whenever asked; experts arrive before it and go once nobody uses the last."""

    def __init__(self, pool: Pool, banks: list[ToyBank], draw: random.Random) -> None:
        self.pool, self.banks, self.draw = pool, banks, draw
        self.routings = [Routing(0, pool.epoch.roster.placed)]
        self.lock = threading.Lock()

    def routing(self, version: int) -> Routing:
        with self.lock:
            if version == len(self.routings):
                placed = self.place()
                for actor, bank in enumerate(self.banks):
                    for layer in LAYERS:
                        bank.hold(layer, placed[layer][actor])
                self.routings.append(Routing(version, placed))
            return self.routings[version]

    def place(self) -> Placement:
        return draw_placement(self.draw, self.pool.shape.num_experts, len(self.banks))

    def drop(self) -> None:
        with self.lock:
            floor = min(replica.version for replica in self.pool.replicas)
            used = [routing.placed for routing in self.routings[floor:]]
            for actor, bank in enumerate(self.banks):
                self.pool.epoch.servers[actor].version_floor = floor
                for layer in LAYERS:
                    bank.keep(layer, {e for placed in used for e in placed[layer][actor]})


class SwapMover(Mover):
    """The first and the last expert change places every time."""

    def place(self) -> Placement:
        last = self.pool.shape.num_experts - 1
        swap = {0: last, last: 0}
        before = self.routings[-1].placed
        return {
            layer: [[swap.get(e, e) for e in held] for held in actors]
            for layer, actors in before.items()
        }


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("attention", "kind"), [(1, Mover), (2, SwapMover), (3, Mover)])
def test_a_new_routing_in_every_step(
    poison: None, layout: str, attention: int, kind: type[Mover]
) -> None:
    """The replicas hear of a routing at different times, never more than two steps apart."""
    steps, actors = 30, 3
    shape = shape_of(layout, attention=attention, experts=actors, num_experts=7)
    pool, draw = Pool(shape), random.Random(attention)
    among = [0, 6, 3] if kind is SwapMover else None  # nearly all rows go where experts swap
    with pool:
        placed = draw_placement(draw, 7, actors)
        banks = [pool.bank(placed, actor) for actor in range(actors)]
        pool.switch(pool.prepare(placed, banks=banks))
        mover = kind(pool, banks, draw)

        def work(rank: int) -> list[int]:
            replica, own, known, used = pool.replicas[rank], random.Random(rank), 0, []
            for step in range(steps):
                for version in range(known + 1, step + 1 + own.randint(0, 1)):
                    replica.route(mover.routing(version))
                    known = version
                parts = [shape.rows(own.choice((0, 1, 5, 20)), 100 * step + rank, among)]
                want = pool.expected(parts)
                assert torch.equal(walk(replica, LAYERS, parts)[0], want[0])
                used.append(replica.version)
                mover.drop()
            return used

        used, *others = in_threads([partial(work, rank) for rank in range(attention)])
        assert all(other == used for other in others), "one version per step, on all ranks"
        assert used == sorted(used) and len(set(used)) > steps // 2, "most steps flip"


@pytest.mark.parametrize("layout", LAYOUTS)
def test_an_idle_mesh_makes_one_empty_step_per_replica(layout: str) -> None:
    pool = Pool(shape_of(layout, attention=3))

    def route() -> None:
        server, routing = pool.epoch.servers[0], Routing(7, pool.epoch.roster.placed)
        for steps, replica in enumerate(pool.replicas, start=1):
            assert replica.version == 0
            replica.route(routing)
            end = time.monotonic() + 10
            while server.steps < steps and time.monotonic() < end:
                time.sleep(0.001)
            time.sleep(0.05)
            assert server.steps == steps
        assert [replica.version for replica in pool.replicas] == [7, 7, 7]
        assert sum(work.calls for work in server.work.values()) == 0

    with pool:
        pool.renew()
        company(pool, {}, route)


def test_experts_that_were_dropped_too_early_are_named() -> None:
    shape = shape_of()
    with ThreadMesh(shape) as mesh:
        mesh.servers[1].version_floor = 3
        with pytest.raises(ExchangeError, match="expert 1"):
            walk(mesh.exchanges[0], LAYERS, [shape.rows(4)])
        mesh.join()
        assert "rank 2, layer -1, open, step 0: the step uses routing version 0" in str(
            mesh.server_errors[1]
        )
    with ThreadMesh(shape) as mesh:
        mesh.banks[0].keep(2, [])
        with pytest.raises(ExchangeError, match="layer 2, combine, step 0: expert 0"):
            walk(mesh.exchanges[0], LAYERS, [shape.rows(4)])
        mesh.join()
        error = mesh.server_errors[0]
        assert isinstance(error, ExchangeError) and (error.layer, error.phase) == (2, "experts")
        assert "is missing" in error.reason


def test_a_version_that_a_rank_never_heard_of_is_named() -> None:
    shape = shape_of(attention=2)
    with ThreadMesh(shape) as mesh:
        placed = mesh.roster.placed
        mesh.exchanges[0].route(Routing(3, placed))
        mesh.exchanges[1].route(Routing(2, placed))
        errors: list[ExchangeError] = []

        def fail(exchange: MeshExchange) -> None:
            with pytest.raises(ExchangeError) as caught:
                walk(exchange, LAYERS, [shape.rows(4)])
            errors.append(caught.value)

        # The other rank hears of it as a lost connection, of whoever hung up first.
        in_threads([partial(fail, exchange) for exchange in mesh.exchanges])
        assert len(errors) == 2
        (unknown,) = [error for error in errors if "is not known here" in error.reason]
        assert unknown.reason == "routing version 2 is not known here" and unknown.rank == 0


def test_a_routing_that_does_not_fit_is_refused_and_changes_nothing() -> None:
    shape = shape_of(num_experts=4, top_k=2)
    with ThreadMesh(shape) as mesh:
        exchange = mesh.exchanges[0]
        wrong: list[tuple[Placement, str]] = [
            ({1: [[0, 1], [2, 3]]}, "other layers"),
            ({layer: [[0, 1, 2, 3]] for layer in LAYERS}, "1 actors, the epoch has 2"),
            ({layer: [[0, 1], [3]] for layer in LAYERS}, r"no actor holds experts \[2\]"),
            ({layer: [[0, 1], [2, 3, 4]] for layer in LAYERS}, "index 4 is out of bounds"),
        ]
        for version, (placed, reason) in enumerate(wrong, start=1):
            with pytest.raises(ValueError, match=f"routing version {version}.*{reason}"):
                exchange.route(Routing(version, placed))
        assert not exchange.peer_waiting
        walk(exchange, LAYERS, [shape.rows(4)])
        assert exchange.version == 0
