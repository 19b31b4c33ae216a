"""How long sequences wait, prefill and decode in an engine, as histograms that travel.

A sequence is one choice of one request in one engine: where it resumes after its replica was lost,
it is another sequence there. Times are time.perf_counter's.
"""

from bisect import bisect_left

import msgspec

# vLLM's buckets, with finer ones below for models that answer in milliseconds.
REQUEST_BUCKETS = (
    0.005, 0.01, 0.05, 0.1, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240,
    480, 960, 1920, 7680,
)  # fmt: skip
# Its first bucket (10 ms) is blind for fast decoding.
TOKEN_BUCKETS = (
    0.002, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5,
    10, 20, 40, 80, 160,
)  # fmt: skip
STEP_BUCKETS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)


class Histogram(msgspec.Struct):
    """counts[i]: observations above bounds[i - 1], up to bounds[i]; one more: above them all.
    total: the sum of what was observed."""

    bounds: tuple[float, ...]
    counts: list[int]
    total: float = 0.0

    def observe(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value


def _seconds() -> Histogram:
    return Histogram(REQUEST_BUCKETS, [0] * (len(REQUEST_BUCKETS) + 1))


def _token_seconds() -> Histogram:
    return Histogram(TOKEN_BUCKETS, [0] * (len(TOKEN_BUCKETS) + 1))


def _tokens() -> Histogram:
    return Histogram(STEP_BUCKETS, [0] * (len(STEP_BUCKETS) + 1))


class Times:
    """Of one sequence. started, first, last: when it got its slot, its first and latest token of
    this engine; 0 until then. tokens: those of this engine."""

    __slots__ = ("arrived", "first", "last", "started", "tokens")

    def __init__(self, arrived: float) -> None:
        self.arrived = arrived
        self.started = self.first = self.last = 0.0
        self.tokens = 0


class Timings(msgspec.Struct):
    """queue: arrival to the first start. prefill: start to the first token. decode: first to last
    token. inference: start to last token. per_token: decode over the tokens after the first.
    The last three of sequences that have left with at least one token, however they ended.
    step_tokens: rows of each step.
    """

    queue: Histogram = msgspec.field(default_factory=_seconds)
    prefill: Histogram = msgspec.field(default_factory=_seconds)
    decode: Histogram = msgspec.field(default_factory=_seconds)
    inference: Histogram = msgspec.field(default_factory=_seconds)
    per_token: Histogram = msgspec.field(default_factory=_token_seconds)
    step_tokens: Histogram = msgspec.field(default_factory=_tokens)

    def copy(self) -> "Timings":
        return Timings(
            *[
                Histogram(each.bounds, list(each.counts), each.total)
                for each in msgspec.structs.astuple(self)
            ]
        )

    def start(self, times: Times, now: float) -> None:
        """The sequence has a slot; once more after a preemption, which counts as computing."""
        if not times.started:
            times.started = now
            self.queue.observe(now - times.arrived)

    def token(self, times: Times, now: float) -> None:
        if not times.tokens:
            times.first = now
            self.prefill.observe(now - times.started)
        times.last = now
        times.tokens += 1

    def leave(self, times: Times) -> None:
        if not times.tokens:
            return
        decode = times.last - times.first
        self.decode.observe(decode)
        self.inference.observe(times.last - times.started)
        if times.tokens > 1:
            self.per_token.observe(decode / (times.tokens - 1))
