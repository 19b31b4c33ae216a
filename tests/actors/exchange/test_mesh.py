"""The mesh gives what one process gives, whatever the routing, sizes, layout and neighbours."""

from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import Tensor

from expertmesh.actors.exchange.mesh import MeshExchange
from expertmesh.actors.exchange.settings import ExchangeSettings
from expertmesh.kernels.registry import load_kernels
from tests.actors.exchange.toy import Rows, Shape, ThreadMesh, in_threads

LAYOUTS = ["direct", "exact", "padded", "mixed"]


def settings(layout: str, **more: object) -> ExchangeSettings:
    return ExchangeSettings(layout=layout, deadline_s=5.0, **{"max_rows": 64, **more})


def one_step(exchange: MeshExchange, shape: Shape, batch: Rows) -> Tensor:
    """All layers with the same rows, stacked."""
    exchange.begin_step(batch[0].shape[0])
    sums = [exchange.combine(exchange.dispatch(layer, *batch)) for layer in shape.layers]
    exchange.end_step()
    return torch.stack(sums)


def step_of_all(mesh: ThreadMesh, shape: Shape, batches: list[Rows]) -> list[Tensor]:
    """Every replica takes the same step with rows of its own."""
    pairs = zip(mesh.exchanges, batches, strict=True)
    return in_threads([partial(one_step, exchange, shape, rows) for exchange, rows in pairs])


def expected(mesh: ThreadMesh, shape: Shape, batch: Rows) -> Tensor:
    oracle = shape.oracle(mesh.roster)
    return torch.stack([oracle.combine(oracle.dispatch(la, *batch)) for la in shape.layers])


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("experts", "num_experts"), [(1, 7), (2, 7), (3, 12), (5, 7)])
def test_equals_one_process(poison: None, layout: str, experts: int, num_experts: int) -> None:
    shape = Shape(experts=experts, num_experts=num_experts, settings=settings(layout))
    with ThreadMesh(shape) as mesh:
        for seed, count in enumerate([1, 5, 0, 33, 2, 64, 1]):
            batch = shape.rows(count, seed)
            got = one_step(mesh.exchanges[0], shape, batch)
            assert torch.equal(got, expected(mesh, shape, batch)), f"{count} rows"


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_token_on_one_actor(poison: None, layout: str) -> None:
    """The others receive zero rows and still take part; which one is empty changes."""
    shape = Shape(experts=3, num_experts=6, top_k=1, settings=settings(layout))
    with ThreadMesh(shape) as mesh:
        for expert in (0, 5, 2, 0):
            batch = shape.rows(1, expert, among=[expert])
            got = one_step(mesh.exchanges[0], shape, batch)
            assert torch.equal(got, expected(mesh, shape, batch))
    # At the end, as `mixed` counts behind the answers.
    rows = [sum(work.rows for work in server.work.values()) for server in mesh.servers]
    assert rows == [6, 3, 3], "only rows that carry a token are counted"


@pytest.mark.parametrize("layout", LAYOUTS)
def test_an_actor_without_experts_in_a_layer(layout: str) -> None:
    placed = {
        1: [[0, 1, 2, 3, 4, 5, 6], []],
        2: [[], [0, 1, 2, 3, 4, 5, 6]],
        4: [[6, 0], [1, 2, 3, 4, 5]],
    }
    shape = Shape(placed=placed, settings=settings(layout))
    with ThreadMesh(shape) as mesh:
        batch = shape.rows(9)
        assert torch.equal(one_step(mesh.exchanges[0], shape, batch), expected(mesh, shape, batch))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_large_batches_go_in_chunks(poison: None, layout: str) -> None:
    shape = Shape(settings=settings(layout, max_rows=8))
    with ThreadMesh(shape) as mesh:
        for count in (8, 9, 37, 3):
            batch = shape.rows(count, count)
            got = one_step(mesh.exchanges[0], shape, batch)
            assert torch.equal(got, expected(mesh, shape, batch)), f"{count} rows"


@pytest.mark.parametrize("layout", LAYOUTS)
def test_two_micro_batches_in_flight(poison: None, layout: str) -> None:
    shape = Shape(settings=settings(layout, max_rows=8))
    with ThreadMesh(shape) as mesh:
        exchange, oracle = mesh.exchanges[0], shape.oracle(mesh.roster)
        halves = [shape.rows(11, 1), shape.rows(5, 2)]
        exchange.begin_step(11, 2)
        flying = [
            exchange.dispatch(shape.layers[0], *half, micro) for micro, half in enumerate(halves)
        ]
        for layer, following in zip(shape.layers, (*shape.layers[1:], None), strict=True):
            for micro, half in enumerate(halves):
                got = exchange.combine(flying[micro])
                assert torch.equal(got, oracle.combine(oracle.dispatch(layer, *half)))
                if following is not None:
                    flying[micro] = exchange.dispatch(following, *half, micro)
        exchange.end_step()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_two_replicas_with_work_of_their_own(poison: None, layout: str) -> None:
    shape = Shape(attention=2, experts=2, settings=settings(layout, max_rows=16))
    with ThreadMesh(shape) as mesh:
        for step, counts in enumerate([(3, 4), (1, 0), (0, 20), (17, 40), (2, 2)]):
            batches = [shape.rows(count, 10 * step + r) for r, count in enumerate(counts)]
            got = step_of_all(mesh, shape, batches)
            for r in range(2):
                assert torch.equal(got[r], expected(mesh, shape, batches[r]))
        # The rows of both replicas went through one call per layer.
        assert all(len(bank.seen) <= 5 * 3 * 3 for bank in mesh.banks)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_an_idle_replica_is_woken_and_joins(layout: str) -> None:
    shape = Shape(attention=2, experts=1, settings=settings(layout))
    with ThreadMesh(shape) as mesh:
        busy, idle = mesh.exchanges
        assert not idle.peer_waiting
        batch = shape.rows(4)

        def idle_loop() -> None:
            for _ in range(3):
                while not idle.peer_waiting:
                    pass
                idle.join_step()

        def work() -> None:
            for _ in range(3):
                assert torch.equal(one_step(busy, shape, batch), expected(mesh, shape, batch))

        in_threads([idle_loop, work])
        assert not idle.peer_waiting


def test_an_idle_replica_fills_in_for_micro_batches_it_does_not_have() -> None:
    shape = Shape(attention=2, experts=2)
    with ThreadMesh(shape) as mesh:
        oracle = shape.oracle(mesh.roster)
        halves = [shape.rows(6, 1), shape.rows(5, 2)]

        def work() -> None:
            exchange = mesh.exchanges[0]
            exchange.begin_step(6, 2)
            for layer in shape.layers:
                flying = [exchange.dispatch(layer, *half, m) for m, half in enumerate(halves)]
                for half, pending in zip(halves, flying, strict=True):
                    got = exchange.combine(pending)
                    assert torch.equal(got, oracle.combine(oracle.dispatch(layer, *half)))
            exchange.end_step()

        in_threads([work, mesh.exchanges[1].join_step])


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("dtype", "limit"), [("bfloat16", 2e-2), ("float8", 1e-1)])
def test_narrow_dispatch_is_close(layout: str, dtype: str, limit: float) -> None:
    more = {"dispatch_dtype": dtype, "combine_dtype": "bfloat16"}
    shape = Shape(attention=2, settings=settings(layout, **more))
    with ThreadMesh(shape) as mesh:
        batches = [shape.rows(9, 1), shape.rows(4, 2)]
        batches[0][0][3] = 0  # a row of zeros has no scale of its own
        got = step_of_all(mesh, shape, batches)
        for r in range(2):
            want = expected(mesh, shape, batches[r])
            assert (got[r] - want).abs().max() < limit * want.abs().max()


def test_float8_rows_are_made_and_read_by_the_operators_given() -> None:
    """With a coarser coding put in their place, that is what arrives."""
    used: set[str] = set()

    def encode(z_TD: Tensor) -> tuple[Tensor, Tensor]:
        used.add("encode")
        return (z_TD.sign() + 1).to(torch.uint8), torch.full((len(z_TD), 1), 0.5)

    def decode(codes_TD: Tensor, scale_T1: Tensor, dtype: torch.dtype) -> Tensor:
        used.add("decode")
        return (codes_TD.to(dtype) - 1) * scale_T1

    kernels = replace(load_kernels(), fp8_encode=encode, fp8_decode=decode)
    narrow = settings("direct", dispatch_dtype="float8")
    with ThreadMesh(Shape(experts=1, settings=narrow, kernels=kernels)) as mesh:
        z_TD, ids_TK, weights_TK = mesh.shape.rows(5)
        [got] = step_of_all(mesh, mesh.shape, [(z_TD, ids_TK, weights_TK)])
        want = expected(mesh, mesh.shape, (z_TD.sign() / 2, ids_TK, weights_TK))
    assert torch.equal(got, want) and used == {"encode", "decode"}


def test_a_row_does_not_depend_on_its_companions() -> None:
    shape = Shape(experts=2)
    with ThreadMesh(shape) as mesh:
        batch = shape.rows(20)
        together = one_step(mesh.exchanges[0], shape, batch)
        for row in (0, 7, 19):
            alone = tuple(part[row : row + 1] for part in batch)
            assert torch.equal(one_step(mesh.exchanges[0], shape, alone)[:, 0], together[:, row])
