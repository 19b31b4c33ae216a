"""Known failures of schedulers over cached hybrid state, one test each.

Equality is of bits: whatever was cached, evicted, moved, preempted or aborted around a request, the
logits behind each of its tokens are those of the model alone.
"""

import random
from pathlib import Path
from threading import Event
from time import monotonic
from typing import Any

import pytest

from expertmesh.actors.attention.messages import GenerateRequest, RequestRefused
from expertmesh.actors.model.batch import PAGE_TOKENS
from expertmesh.actors.state.pages import pages_for
from tests.support.engines import check_idle, finish, request
from tests.support.state_below import STALL_S, Tiers, wait_for
from tests.support.state_model import cached, cacheless, small_model
from tests.support.state_oracle import Oracle
from tests.support.state_session import Session, ids, oracle, session
from tests.support.state_store import Faults, MemoryStore

# --- a slot's last owner must not show (D1) -------------------------------------------------------


@pytest.mark.parametrize("step_tokens", [64, 128])
@pytest.mark.parametrize("length", [1, 65, 129])
def test_a_first_or_last_chunk_of_one_token(length: int, step_tokens: int) -> None:
    one = session(slots=2, step_tokens=step_tokens)
    one.submit("long", ids(1, 150), 9)
    one.finish()
    one.submit("beside", ids(2, 3), 12)
    one.step(2)
    one.submit("short", ids(3, length), 5)
    one.finish()
    one.check_all()


def test_one_token_left_after_a_resume() -> None:
    prompt = ids(4, 100)
    answer = oracle().greedy(prompt, 6)
    one = session(slots=2)
    one.submit("long", ids(1, 150), 3)
    one.finish()
    each = GenerateRequest("r", prompt, request("r", prompt, 6).params, resume_ids=answer[:5])
    one.requests["r"] = each
    one.engine.submit(each)
    one.finish()
    assert one.answers["r"].token_ids == answer[5:]


# --- chunks (D2) ----------------------------------------------------------------------------------


@pytest.mark.parametrize("warm", [0, 192])
@pytest.mark.parametrize("step_tokens", [8, 63, 65, 128, 4096])
def test_no_budget_changes_a_bit(step_tokens: int, warm: int) -> None:
    one = session(step_tokens=step_tokens)
    prompt = ids(5, 4 * PAGE_TOKENS + 1)
    if warm:
        one.submit("first", prompt[: warm + 1], 1)
        one.finish()
    for i in range(2):
        one.submit(f"beside{i}", ids(6 + i, 3), 6)
    one.step()
    one.submit("r", prompt, 4)
    one.finish()
    assert one.cached["r"] == warm
    assert one.answers["r"].token_ids == oracle().greedy(prompt, 4)
    if step_tokens >= PAGE_TOKENS:
        one.check_all()
        return
    # Chunks off the grid: other bits than without, the same as without a cache.
    alone = Session(cacheless(small_model(), step_tokens=step_tokens))
    alone.submit("r", prompt, 4)
    alone.finish()
    assert one.tap.seen["r"] == alone.tap.seen["r"]


@pytest.mark.parametrize("step_tokens", [8, 63])
def test_a_budget_below_a_page_keeps_its_state_to_itself(step_tokens: int) -> None:
    """Its chunks end off the grid, so its bits are not those of other replicas."""
    store = MemoryStore()
    small = session(store, step_tokens=step_tokens)
    small.submit("r", ids(7, 200), 3)
    small.finish()
    other = session(store=store)
    other.ask("r", ids(7, 200), 3)


# --- warm, second turn, tool turn, after eviction, off (D3) ---------------------------------------


@pytest.mark.parametrize("family", ["device", "store", "off"])
def test_warm_equals_cold(family: str) -> None:
    store = MemoryStore() if family == "store" else None
    one = session(store=store, state={"prefix_cache": family != "off"})
    prompt, tail = ids(8, 300), ids(9, 40)
    hits = [one.ask("cold", prompt)]

    def ask(name: str, prompt: list[int]) -> None:
        if family == "store":  # everything comes back from below
            one.engine.cache.evict(pages=64, snapshots=16)
        hits.append(one.ask(name, prompt))

    ask("again", prompt)
    ask("tail", prompt + tail)
    turn = prompt + one.answers["cold"].token_ids + tail
    ask("second turn", turn)
    ask("tool turn", turn + one.answers["second turn"].token_ids + ids(10, 130))
    one.engine.cache.evict(pages=2, snapshots=2)
    ask("evicted", prompt)
    if family == "off":
        assert hits == [0] * 6
        return
    assert hits[:4] == [0, 256, 256, 256]
    assert hits[4] == (len(turn) - 1) // PAGE_TOKENS * PAGE_TOKENS
    if family == "device":
        assert 0 <= hits[5] <= 256
        assert one.engine.stats().cache.hits == sum(hits)


@pytest.mark.parametrize("length", [64, 65, 127, 128])
def test_lengths_around_a_page(length: int) -> None:
    one = session()
    assert one.ask("cold", ids(11, length)) == 0
    most = (length - 1) // PAGE_TOKENS * PAGE_TOKENS
    assert one.ask("again", ids(11, length)) == most
    longer = one.ask("longer", [*ids(11, length), 1])
    assert longer in (most, length // PAGE_TOKENS * PAGE_TOKENS)


@pytest.mark.parametrize("mode", ["exact", "offload", "select"])
def test_prompts_that_end_at_a_page_in_every_mode(mode: str) -> None:
    """Snapshots lie before and behind their last token, on the device and below. Selection reads
    all that is old while it is so little."""
    state = {"kv_mode": mode, "sink_tokens": 64, "window_tokens": 64}
    one = session(MemoryStore(faults=Faults(delay=1)), state=state, step_tokens=128)
    for length in (383, 384, 385):
        prompt, start = ids(length, 450), (length - 1) // PAGE_TOKENS * PAGE_TOKENS
        assert one.ask(f"cold {length}", prompt[:length], 2) == 0
        assert one.ask(f"longer {length}", prompt, 1) >= start
        assert one.ask(f"warm {length}", prompt[:length], 2) == start
        one.engine.cache.evict()
        assert one.ask(f"from below {length}", prompt[:length], 2) == start
    one.submit("last", prompt, 5)
    one.step(3)
    assert (one.engine.stats().cache.offloaded_bytes > 0) == (mode != "exact")
    one.finish()
    one.check_all(["last"])


@pytest.mark.parametrize("step_tokens", [64, 512])
def test_what_is_told_of_a_prompt_is_told_of_all_of_it(step_tokens: int) -> None:
    """Scores and routing are only known of tokens that are computed, cached or not."""
    runner = small_model(experts=True)
    each = request("r", ids(52, 200), 3, prompt_logprobs=1, logprobs=2, want_routed_experts=True)
    alone = cacheless(runner, step_tokens=step_tokens)
    alone.submit(each)
    engine = cached(runner, step_tokens=step_tokens)
    engine.submit(request("warm", each.prompt_ids, 1))
    finish(engine)
    engine.submit(each)
    assert finish(engine)["r"] == finish(alone)["r"]
    engine.submit(request("after", each.prompt_ids, 1))
    finish(engine)
    assert engine.stats().cache.hits == 192


# --- slots and pages keep their owners (D5) -------------------------------------------------------


def test_slots_are_never_mixed_up() -> None:
    rng = random.Random(12)
    one = session(slots=3, pages=14, state={"snapshots": 4})
    shared = [ids(20 + i, 140) for i in range(3)]
    for number in range(40):
        if rng.random() < 0.6:
            prompt = rng.choice(shared)[: rng.choice((30, 64, 65, 100, 129, 140))]
        else:
            prompt = ids(40 + number % 7, rng.choice((1, 10, 65)))
        one.submit(f"r{number}", prompt, rng.randint(1, 4))
        one.step(rng.randint(0, 1))
        if rng.random() < 0.2:
            one.engine.abort(f"r{rng.randrange(number + 1)}")
    one.finish()
    done = [name for name, each in one.answers.items() if each.finish_reason == "length"]
    assert len(done) > 20 and len(one.answers) == 40
    one.check_all(done)


# --- an old disk under another model, and a damaged one (D7) --------------------------------------


class Disk:
    """Engines one after the other over one folder, as a server that is started again."""

    def __init__(self, folder: Path) -> None:
        self.below = Tiers(1, folder)
        self.below.state |= {"host_bytes": 0, "codec": "lossless", "checkpoint_tokens": 64}

    def ask(self, prompt: list[int], layers: int = 4, fingerprint: bytes = b"small") -> Session:
        """One request to an engine that has just started; it is closed again."""
        runner, woken = small_model(layers), Event()
        store = self.below.open(0, runner.state.layout, woken.set)
        engine = cached(runner, 64, 4, store, self.below.state, woken, fingerprint=fingerprint)
        one = Session(engine)
        one.submit("r", prompt, 3)
        deadline = monotonic() + STALL_S
        while one.open and monotonic() < deadline:
            one.step()
            if not engine.has_work:
                wait_for([woken])
        assert Oracle(runner).greedy(prompt, 3) == one.answers["r"].token_ids
        self.below.lose(0)
        return one


def test_an_old_disk_serves_its_own_model_alone(tmp_path: Path) -> None:
    disk, prompt = Disk(tmp_path), ids(50, 300)
    assert disk.ask(prompt).cached["r"] == 0
    assert disk.ask(prompt, fingerprint=b"other weights").cached["r"] == 0
    assert disk.ask(prompt, layers=2).cached["r"] == 0  # other shapes under the same names
    disk.ask(prompt).check_all()  # finds some of these, which are not its own
    again = disk.ask(prompt)
    assert again.cached["r"] == 256 and again.engine.stats().cache.hits_by_tier == {"disk": 256}
    again.check_all()


@pytest.mark.parametrize("seed", range(3))
def test_a_flipped_byte_is_a_miss(seed: int, tmp_path: Path) -> None:
    disk, prompt, rng = Disk(tmp_path), ids(51, 300), random.Random(seed)
    disk.ask(prompt)
    for _ in range(30):
        disk.below.damage(rng)
    disk.ask(prompt).check_all()


# --- progress with loads under way (D8) -----------------------------------------------------------


@pytest.mark.parametrize("fail", [0.0, 0.5, 1.0])
def test_slow_or_failing_loads_never_stall_a_small_pool(fail: float) -> None:
    store = MemoryStore(random.Random(1), Faults(delay=12, fail=fail))
    one = session(store=store, pages=12, slots=4, state={"snapshots": 4})
    prompts = [ids(60 + i, 64 * (2 + i % 4) + 5) for i in range(6)]
    for i, prompt in enumerate(prompts):
        one.ask(f"first{i}", prompt, 2)
    one.engine.cache.evict(pages=12, snapshots=4)
    for i in range(30):
        one.submit(f"r{i}", prompts[i % 6] + ids(90 + i % 4, i % 3), 1)
    one.finish()
    one.check_all()
    assert store.loads and (fail < 1 or store.failed == store.loads)


def test_a_long_queue_loads_a_few_at_a_time() -> None:
    store = MemoryStore(faults=Faults(delay=0))
    one = session(store, slots=2, pages=30, state={"snapshots": 30})
    for i in range(12):
        one.ask(f"first{i}", ids(150 + i, 200), 1)
    one.engine.cache.evict()
    store.faults.delay = 4
    lookup = one.engine.cache.lookup
    lookup._most_held = most = 100_000  # three of them
    for i in range(12):
        one.submit(f"r{i}", ids(150 + i, 200), 1 + i % 2)
    held = 0
    while one.open:
        one.step()
        held = max(held, one.engine.stats().cache.loading_bytes)
        assert one.engine.has_work or store.loading or not one.open, "nobody would wake it"
    check_idle(one.engine)
    one.check_all()
    assert sum(one.cached[f"r{i}"] for i in range(12)) == 12 * 192
    assert 0 < held <= most and not lookup._held and not lookup.waiting


# --- what fits an empty pool always fits (D9) -----------------------------------------------------


@pytest.mark.parametrize("warm", [False, True])
def test_prompts_near_the_capacity(warm: bool) -> None:
    pages = 6
    capacity = pages * PAGE_TOKENS
    one = session(pages=pages, slots=2, state={"snapshots": 8})
    for length in [*range(capacity - 2 * PAGE_TOKENS, capacity + 1, 32), capacity + 1]:
        prompt = ids(70 if warm else length, length)
        if pages_for(length) > pages:
            with pytest.raises(RequestRefused, match="pages"):
                one.submit("big", prompt, 1)
            continue
        one.submit(f"r{length}", prompt, 1)
        one.step()
        one.submit(f"short{length}", [3], 2)
        one.finish()
        one.check_all([f"r{length}", f"short{length}"])


def test_an_aborted_giant_leaves_nothing_behind() -> None:
    one = session(pages=6, slots=2)
    one.submit("running", ids(71, 200), 60)
    one.step(2)
    one.submit("giant", ids(72, 6 * PAGE_TOKENS), 1)
    one.step(3)
    one.engine.abort("giant")
    one.submit("short", [5], 2)
    one.step(4)
    assert one.answers["short"].finish_reason == "length"
    one.engine.abort("running")
    one.finish()
    one.check_all(["short"])


# --- one heavy request among light ones (D10) -----------------------------------------------------


def test_light_ones_pass_a_heavy_one_and_it_still_runs() -> None:
    one = session(pages=20, slots=8, max_bypass=6)
    one.ask("warm", ids(73, 250), 1)  # the heavy one's prefix lies idle in the pool
    one.submit("holder", ids(74, 13 * PAGE_TOKENS), 30)
    one.step(8)
    one.submit("heavy", ids(73, 10 * PAGE_TOKENS), 2)
    for i in range(10):
        one.submit(f"light{i}", ids(80 + i, 20), 2)
    one.step(8)
    done = [i for i in range(10) if f"light{i}" in one.answers]
    assert len(done) >= 6 and "heavy" not in one.answers
    one.finish()
    one.check_all()


# --- priorities (D11) -----------------------------------------------------------------------------


def test_urgent_ones_pass_and_patient_ones_are_served() -> None:
    one = session(slots=2, pages=40, ageing_steps=16)
    for i in range(2):
        one.submit(f"low{i}", ids(100 + i, 70), 40, priority=1)
    one.step(3)
    one.submit("high", ids(102, 70), 2, priority=-1)
    one.step(4)
    assert one.answers["high"].finish_reason == "length"
    one.submit("patient", ids(103, 5), 2, priority=1)
    for i in range(60):
        one.submit(f"stream{i}", ids(104 + i % 3, 65), 2, priority=0)
        one.step(2)
        if "patient" in one.answers:
            break
    assert "patient" in one.answers
    one.finish()
    one.check_all()


def test_equals_under_pressure_do_not_take_turns_at_evicting() -> None:
    one = session(pages=4, slots=2)
    for i in range(2):
        one.submit(f"r{i}", ids(110 + i, 120), 30)
    one.finish()
    one.check_all()
    assert one.engine.stats().preemptions <= 2


# --- generated tokens stay generated (D13) --------------------------------------------------------


@pytest.mark.parametrize("tier", ["device", "store"])
@pytest.mark.parametrize("at", [2, 9])
def test_penalties_after_a_recompute(at: int, tier: str) -> None:
    params: dict[str, Any] = {
        "frequency_penalty": 1.5, "presence_penalty": 1.0, "repetition_penalty": 1.3,
        "min_tokens": 20, "stop_token_ids": [7], "logprobs": 2,
    }  # fmt: skip
    each = request("r", ids(120, 130), 50, **params)
    alone = cacheless(small_model())
    alone.submit(each)
    expected = finish(alone)["r"]
    one = session(store=MemoryStore() if tier == "store" else None, pages=12, slots=2)
    one.submit("r", each.prompt_ids, 50, **params)
    one.submit("other", ids(121, 100), 30)
    for more in (at, 5, 3):
        one.step(more)
        for seq in one.engine.scheduler.running[:1]:
            one.engine.scheduler.preempt(seq)
        if tier == "store":
            one.engine.cache.evict(pages=12, snapshots=16)
    one.finish()
    assert one.answers["r"] == expected


# --- aborts at any moment (D16) -------------------------------------------------------------------


def test_aborts_at_any_moment_leave_nothing() -> None:
    rng = random.Random(13)
    store = MemoryStore(random.Random(2), Faults(delay=4, fail=0.1))
    one = session(store=store, pages=16, slots=8, state={"snapshots": 5})
    before = one.engine.stats()
    prompts = [ids(130 + i, rng.choice((65, 130, 200))) for i in range(5)]
    for number in range(50):
        one.submit(f"r{number}", rng.choice(prompts)[: rng.choice((64, 65, 130, 200))], 2)
        if rng.random() < 0.5:
            one.engine.abort(f"r{rng.randrange(max(0, number - 10), number + 1)}")
        if rng.random() < 0.1:
            one.engine.cache.evict(pages=16, snapshots=5)
        one.step(rng.randint(0, 2))
    one.finish()
    stats = one.engine.stats()
    ends = stats.finished_abort + stats.finished_length + stats.finished_stop
    assert ends == len(one.answers) == 50 and stats.finished_error == 0
    assert all(each.finishes == 1 for each in one.answers.values())
    assert (stats.pages_free, stats.slots_free) == (before.pages_free, before.slots_free)
    assert stats.cache.loading == 0 and all(load.done for load in store.loading)
    one.check_all([n for n, each in one.answers.items() if each.finish_reason == "length"])
