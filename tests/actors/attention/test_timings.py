"""When sequences start, speak and leave, as the engine's histograms have it."""

import msgspec

from expertmesh.actors.attention.messages import EngineStats
from expertmesh.actors.attention.timings import Times, Timings
from tests.support.engines import fake_engine, finish, request


def test_a_sequence_is_observed_once_per_stage() -> None:
    timings, times = Timings(), Times(arrived=10.0)
    timings.start(times, 11.0)
    timings.start(times, 50.0)  # after a preemption: it does not queue again
    for now in (13.0, 13.5, 14.0):
        timings.token(times, now)
    timings.leave(times)
    assert (timings.queue.total, timings.prefill.total) == (1.0, 2.0)
    assert (timings.decode.total, timings.inference.total) == (1.0, 3.0)
    assert timings.per_token.total == 0.5
    for each in (timings.queue, timings.prefill, timings.decode, timings.inference):
        assert sum(each.counts) == 1


def test_without_a_token_there_is_nothing_to_divide() -> None:
    timings, times = Timings(), Times(1.0)
    timings.leave(times)
    timings.start(times, 2.0)
    timings.leave(times)
    timings.token(times, 3.0)
    timings.leave(times)
    assert sum(timings.per_token.counts) == 0 and sum(timings.decode.counts) == 1


def test_a_bound_belongs_to_its_own_bucket_and_the_last_is_open() -> None:
    queue = Timings().queue
    for value in (0.0, 0.005, 0.006, 7680.0, 7681.0):
        queue.observe(value)
    assert queue.counts[:2] == [2, 1] and queue.counts[-2:] == [1, 1]


def test_the_engine_observes_every_sequence_and_step() -> None:
    engine = fake_engine(pages=5, slots=4)  # so few pages that sequences are preempted
    for i in range(4):
        engine.submit(request(f"r{i}", [5] * 40, max_tokens=40))
    finish(engine)
    stats = msgspec.msgpack.decode(msgspec.msgpack.encode(engine.stats()), type=EngineStats)
    timings = stats.timings
    assert stats.preemptions > 0
    for each in (timings.queue, timings.prefill, timings.decode, timings.inference):
        assert sum(each.counts) == 4
    assert sum(timings.step_tokens.counts) == stats.steps
    computed = 4 * (40 + 39) + stats.recomputed_tokens
    assert timings.step_tokens.total == computed, "every row once, the last token never"
    assert timings.inference.total >= timings.prefill.total + timings.decode.total - 1e-6
