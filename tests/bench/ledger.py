"""What counting costs a step, and the ledger a window. No model: an exchange that does nothing."""

import argparse
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from expertmesh.actors.exchange.base import Exchange
from expertmesh.actors.exchange.counting import CountingExchange, RoutingCounts, RoutingSnapshot
from expertmesh.cluster.ledger.ledger import Ledger
from expertmesh.cluster.placement import contiguous_placement
from tests.bench import machine

# (name, MoE layers, experts, top k, latent width)
SHAPES = (("nano", 7, 16, 4, 192), ("k3", 92, 896, 16, 3584))


class Nothing:
    """An exchange that returns the rows."""

    def begin_step(self, rows: int, micros: int = 1) -> None: ...

    def dispatch(
        self, layer: int, z_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor, micro: int = 0
    ) -> Tensor:
        return z_TD

    def combine(self, pending: Tensor) -> Tensor:
        return pending

    def end_step(self) -> None: ...


def main(arguments: Sequence[str]) -> dict[str, Any]:
    parser = argparse.ArgumentParser(prog="tests.bench ledger", description=__doc__)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 32, 512])
    parser.add_argument("--seconds", type=float, default=1.0, help="per number")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    return {
        "machine": machine.facts(),
        "counting": [
            _counting(shape, rows, options.seconds) for shape in SHAPES for rows in options.rows
        ],
        "ledger": [_ledger(shape, options.seconds) for shape in SHAPES],
    }


def _best(work: Callable[[], object], seconds: float) -> float:
    """Seconds of the quickest of as many calls as fit, at least 5."""
    best, end, calls = float("inf"), time.perf_counter() + seconds, 0
    while calls < 5 or time.perf_counter() < end:
        began = time.perf_counter()
        work()
        best = min(best, time.perf_counter() - began)
        calls += 1
    return best


@torch.inference_mode()
def _counting(shape: tuple[str, int, int, int, int], rows: int, seconds: float) -> dict[str, Any]:
    name, layers, experts, top_k, width = shape
    generator = torch.Generator().manual_seed(0)
    z_TD = torch.randn(rows, width, generator=generator)
    ids_TK = torch.randint(0, experts, (rows, top_k), generator=generator)
    weights_TK = torch.rand(rows, top_k, generator=generator)
    counts = RoutingCounts(range(layers), experts, top_k)

    def step(exchange: Exchange) -> None:
        exchange.begin_step(rows)
        for layer in range(layers):
            exchange.combine(exchange.dispatch(layer, z_TD, ids_TK, weights_TK))
        exchange.end_step()

    bare = _best(lambda: step(Nothing()), seconds)
    counted = _best(lambda: step(CountingExchange(Nothing(), counts)), seconds)
    counts.start_recording(1 << 30)
    recorded = _best(lambda: step(CountingExchange(Nothing(), counts)), seconds)
    return {
        "shape": name,
        "rows": rows,
        "us_per_step": round((counted - bare) * 1e6, 1),
        "us_per_layer": round((counted - bare) / layers * 1e6, 2),
        "us_per_layer_recording": round((recorded - bare) / layers * 1e6, 2),
        "us_per_snapshot": round(_best(counts.snapshot, seconds) * 1e6, 1),
    }


def _ledger(shape: tuple[str, int, int, int, int], seconds: float) -> dict[str, Any]:
    name, layers, experts, top_k, _ = shape
    ledger, rng = Ledger(tuple(range(layers)), experts, top_k), np.random.default_rng(0)
    window_LE = rng.poisson(900, (layers, experts))
    total, steps = np.zeros((layers, experts), np.int64), 0
    zero = (0,) * layers

    def window() -> None:
        nonlocal total, steps
        total, steps = total + window_LE, steps + 1
        packed = total.astype("<i8").tobytes()
        shot = RoutingSnapshot("a", tuple(range(layers)), experts, top_k, steps, packed, zero, zero)
        ledger.add(shot)
        ledger.close_window(10.0)

    placement = contiguous_placement(tuple(range(layers)), experts, min(64, experts))
    return {
        "shape": name,
        "ms_per_window": round(_best(window, seconds) * 1e3, 2),
        "ms_per_scrape": round(_best(lambda: ledger.routing_stats(placement), seconds) * 1e3, 2),
        "ms_per_report": round(_best(lambda: ledger.report(placement), seconds) * 1e3, 2),
    }
