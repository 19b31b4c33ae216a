"""Times of calls on the device: by events around each call, or by a graph of many calls."""

import time
from collections.abc import Callable, Sequence
from itertools import cycle
from typing import Any

import torch

Call = Callable[[], Any]


class EventTimer:
    """Medians of `triton.testing.do_bench`, which also empties the L2 cache before each call."""

    def __init__(self, warmup_ms: float = 10, repeat_ms: float = 60) -> None:
        self._warmup, self._repeat = warmup_ms, repeat_ms

    def call_us(self, call: Call) -> dict[str, float]:
        """Median, 20th and 80th percentile of one call, in microseconds."""
        from triton.testing import do_bench

        low, middle, high = do_bench(
            call, warmup=self._warmup, rep=self._repeat, quantiles=[0.2, 0.5, 0.8]
        )
        return {"median_us": 1e3 * middle, "p20_us": 1e3 * low, "p80_us": 1e3 * high}

    def calls_us(self, calls: Sequence[Call]) -> dict[str, float]:
        """The same over calls that differ in their buffers, taken in turn."""
        turn = cycle(calls)
        return self.call_us(lambda: next(turn)())

    def once_us(self, call: Call) -> float:
        """By the wall clock, after a first call that is not timed."""
        call()
        torch.cuda.synchronize()
        begin = time.perf_counter()
        call()
        torch.cuda.synchronize()
        return 1e6 * (time.perf_counter() - begin)

    def graph_us(self, calls: Sequence[Call]) -> dict[str, float]:
        """Per call, of a graph that holds all of them: without the host's time to launch.

        Raises RuntimeError for a call that waits for the device.
        """
        graph, _ = captured(calls)
        times = self.call_us(graph.replay)
        return {name: value / len(calls) for name, value in times.items()}


class WallTimer:
    """One call each by the wall clock: where there is no device, only to run everything once."""

    def call_us(self, call: Call) -> dict[str, float]:
        begin = time.perf_counter()
        call()
        us = 1e6 * (time.perf_counter() - begin)
        return {"median_us": us, "p20_us": us, "p80_us": us}

    def calls_us(self, calls: Sequence[Call]) -> dict[str, float]:
        return self.call_us(calls[0])

    def once_us(self, call: Call) -> float:
        return self.call_us(call)["median_us"]

    def graph_us(self, calls: Sequence[Call]) -> dict[str, float]:
        raise RuntimeError("no graphs without a device")


Timer = EventTimer | WallTimer


def captured(calls: Sequence[Call]) -> tuple[torch.cuda.CUDAGraph, list[Any]]:
    """(graph, what the calls returned). The results live on, so that every call writes to memory
    of its own. All calls are made twice before: kernels are compiled and workspaces taken."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            for call in calls[:2]:
                call()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph, results = torch.cuda.CUDAGraph(), list[Any]()
    with torch.cuda.graph(graph):
        for call in calls:
            results.append(call())
    return graph, results
