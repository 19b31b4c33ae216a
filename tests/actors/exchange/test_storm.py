"""Thousands of steps over 4 to 8 ranks in bad weather: nobody hangs, nobody disagrees. See
storm.py. `make chaos` takes 10,000."""

import multiprocessing
import os
from collections.abc import Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from typing import Any

import pytest
import torch

from tests.actors.exchange.storm import Storm

STEPS = int(os.environ.get("EXPERTMESH_STORM_STEPS", "4000"))
# (layout, ranks, steps), the longest first: two processes take them in this order.
STORMS = tuple(
    (layout, ranks, STEPS * share // 100)
    for layout, ranks, share in (
        ("direct", 6, 25), ("direct", 4, 50), ("direct", 8, 15), ("padded", 6, 5), ("exact", 6, 5),
    )
)  # fmt: skip


def storm(layout: str, ranks: int, steps: int) -> dict[str, Any]:
    torch.set_num_threads(1)
    return Storm(steps, ranks, seed=ranks, layout=layout).run()


@pytest.fixture(scope="module")
def storms() -> Iterator[dict[tuple[str, int, int], Future[dict[str, Any]]]]:
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(2, mp_context=context, max_tasks_per_child=1) as pool:
        yield {shape: pool.submit(storm, *shape) for shape in STORMS}


@pytest.mark.parametrize("shape", STORMS, ids=lambda shape: "-".join(map(str, shape)))
def test_nobody_hangs_and_nobody_disagrees(
    storms: dict[tuple[str, int, int], Future[dict[str, Any]]], shape: tuple[str, int, int]
) -> None:
    report = storms[shape].result(timeout=170)
    assert report["failures"] == []
    assert all(report[what] for what in ("worked", "joined", "resumed", "flips", "epochs"))
