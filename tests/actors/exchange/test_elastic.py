"""A step outlives its epochs: whatever breaks and wherever, the sums are those of one process."""

import itertools
from functools import partial

import pytest
import torch

from expertmesh.actors.exchange.settings import ExchangeSettings
from tests.actors.exchange.pool import Pool, Steward, walk
from tests.actors.exchange.toy import Shape, in_threads

LAYERS = (1, 2, 4)
LAYOUTS = ["direct", "exact", "padded"]


def shape_of(layout: str = "direct", max_rows: int = 64, **more: int) -> Shape:
    settings = ExchangeSettings(layout=layout, deadline_s=3.0, max_rows=max_rows)
    return Shape(layers=LAYERS, settings=settings, **more)


PLACES = [("begin", -1, 0), ("end", -1, 0)] + [
    (phase, layer, micro)
    for phase, layer, micro in itertools.product(("dispatch", "combine"), LAYERS, (0, 1))
]


@pytest.mark.parametrize("how", ["killed", "switched"])
@pytest.mark.parametrize("place", PLACES, ids=str)
def test_a_step_goes_on(how: str, place: tuple[str, int, int]) -> None:
    pool = Pool(shape_of(max_rows=8))
    parts = [pool.shape.rows(19, 1), pool.shape.rows(6, 2)]
    hit = []

    def before(*now: object) -> None:
        if now == place and not hit:
            hit.append(now)
            if how == "killed":
                pool.epoch.servers[1].close()
            else:
                pool.renew()

    with pool, Steward(pool):
        pool.renew()
        exchange = pool.replicas[0]
        got = walk(exchange, LAYERS, parts, before)
        again = walk(exchange, LAYERS, parts)
        assert hit and exchange.epoch == 4 and exchange.broken is None
        for want, *both in zip(pool.expected(parts), got, again, strict=True):
            assert all(torch.equal(want, sums) for sums in both)


def test_smoke() -> None:
    pool = Pool(shape_of(attention=2))
    with pool:
        pool.renew()
        parts = [pool.shape.rows(9, 1)]
        got = in_threads([partial(walk, e, LAYERS, parts) for e in pool.replicas])
        assert torch.equal(got[0][0], pool.expected(parts)[0])
