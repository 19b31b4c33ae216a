"""What has gone wrong in engines that cache hybrid state, one regression each (kv-state section 4).

Every scene passes, and with the mistake put back in (state_mutants) it fails: what it checks would
be noticed here too.
"""

import random
from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch

from expertmesh.actors.attention.engine import Engine
from expertmesh.actors.attention.messages import GenerateRequest, TokenOutput
from expertmesh.actors.attention.scheduler import Plan
from expertmesh.actors.model.batch import PAGE_TOKENS
from expertmesh.actors.state.item import Kind
from tests.support import state_mutants as mutants
from tests.support.engines import request
from tests.support.state_oracle import Piece
from tests.support.state_session import ids, oracle, session
from tests.support.state_store import Faults, MemoryStore

Scene = Callable[[], None]


def chunked_equals_whole() -> None:
    one = session(step_tokens=96)
    one.submit("beside", ids(1, 3), 5)
    one.step()
    one.submit("r", ids(2, 257), 3)
    one.finish()
    one.check_all()


def warm_equals_cold() -> None:
    one = session(slots=2)
    assert one.ask("cold", ids(3, 300)) == 0
    assert one.ask("warm", ids(3, 300)) == 256
    assert one.ask("turn", ids(3, 300) + ids(4, 100)) == 256


def warm_from_below() -> None:
    one = session(MemoryStore(), slots=2)
    one.ask("cold", ids(3, 300))
    one.engine.cache.evict()
    assert one.ask("warm", ids(3, 300)) == 256
    one.engine.cache.evict()
    assert one.ask("turn", ids(3, 300) + ids(4, 100)) == 256


def aborted_prefill_then_again() -> None:
    one = session(step_tokens=64)
    one.submit("first", ids(5, 300))
    one.step()
    one.engine.abort("first")
    one.step()
    del one.requests["first"]
    one.ask("again", ids(5, 300))


def slot_of_a_stranger() -> None:
    one = session(slots=1)
    one.ask("stranger", ids(6, 100))
    one.ask("one", [5], 6)


def what_is_not_finite_is_forgotten() -> None:
    """A slot breaks between two chunks: what is named until that is noticed is broken too."""
    for below in (False, True):
        one = session(MemoryStore(), step_tokens=64)
        one.submit("broken", ids(47, 300))
        one.step()
        one.engine.state.kda[:, one.engine.scheduler.running[0].slot] = torch.nan
        one.step(4)
        assert one.answers["broken"].finish_reason == "error"
        del one.requests["broken"]
        if below:
            one.engine.cache.evict()
        assert one.ask("again", ids(47, 300)) == 0


def readers_do_not_write() -> None:
    one = session()
    one.ask("first", ids(7, 130))
    for i in range(3):
        assert one.ask(f"reader{i}", ids(7, 129) + ids(8 + i, 30)) == 128


def parted_prompts() -> None:
    """Pages are known further than the last snapshot below."""
    one = session(state={"ladder_tokens": 128})
    one.ask("long", ids(11, 500))
    assert one.ask("parts", ids(11, 250) + ids(12, 100)) == 128
    assert one.ask("again", ids(11, 250) + ids(13, 100)) == 192


def lengths_around_a_page() -> None:
    for length in (127, 128, 129):
        one = session()
        one.ask("cold", ids(14, length))
        one.ask("long", ids(14, 200))  # leaves a snapshot at every page
        assert one.ask("warm", ids(14, length)) == (length - 1) // PAGE_TOKENS * PAGE_TOKENS


def preempted_while_loading() -> None:
    one = session(MemoryStore(faults=Faults(delay=3)), slots=3, pages=14)
    for i in range(3):
        one.ask(f"first{i}", ids(15 + i, 200), 20)
        one.engine.cache.evict()
    for i in range(3):
        one.submit(f"r{i}", ids(15 + i, 200), 20)
    for step in range(30):
        one.step()
        for seq in one.engine.scheduler.running[-1:]:
            if step % 9 == 0:
                one.engine.scheduler.preempt(seq)
                one.engine.cache.evict(pages=3)
    one.finish()
    one.check_all()
    assert one.store is not None
    one.store.check()


def replayed_right_after_a_load() -> None:
    """A sequence goes on from its checkpoint; its first step is nothing but decode rows."""
    one = session(MemoryStore(), graphs=True, state={"checkpoint_tokens": 64})
    one.submit("r", ids(45, 100), 40)
    one.step(35)
    one.engine.scheduler.preempt(one.engine.scheduler.running[0])
    one.engine.cache.evict()
    one.finish()
    one.check_all()
    assert one.engine.stats().recomputed_tokens < 20


def evicted_while_waiting() -> None:
    one = session(slots=2, pages=8)
    one.ask("first", ids(18, 300), 1)
    one.submit("holder", ids(19, 250), 5)  # all pages but those of "first"
    one.step()
    one.submit("waits", ids(18, 300), 2)
    one.step(2)
    one.engine.cache.evict(pages=2)
    one.step()
    one.engine.cache.evict()
    one.finish()
    one.check_all()


def evicted_while_the_rest_is_loaded() -> None:
    """A snapshot that was on the device when the pages were asked for is needed from below too."""
    one = session(MemoryStore(faults=Faults(delay=0)))
    one.ask("first", ids(46, 300))
    one.engine.cache.evict(snapshots=0)
    assert one.store is not None
    one.store.faults.delay = 5
    one.submit("again", ids(46, 300))
    one.step(2)
    one.engine.cache.evict()
    one.finish()
    one.check_all()
    assert one.cached["again"] == 256


def loads_that_always_fail() -> None:
    one = session(MemoryStore(faults=Faults(delay=1)))
    one.ask("first", ids(20, 300))
    one.engine.cache.evict()
    assert one.store is not None
    one.store.faults.fail = 1.0
    one.store.rng = random.Random(1)  # which of them it remembers
    one.submit("again", ids(20, 300))
    one.finish(most=60)
    one.check_all()
    assert one.store.failed == 1


def others_pass_a_load() -> None:
    one = session(MemoryStore(random.Random(3), Faults(delay=0)))
    one.ask("first", ids(21, 300))
    one.engine.cache.evict()
    assert one.store is not None
    one.store.faults.delay = 10_000
    for i in range(2):
        one.submit(f"waits{i}", ids(21, 300))
    one.step()
    one.submit("passes", ids(22, 70), 3)
    one.step(6)
    assert one.open == ["waits0", "waits1"]
    for load in one.store.loading:
        load.ticks = 0
    one.finish()
    one.check_all()


def a_load_that_ends_inside_a_step() -> None:
    """Too late for the plan, too early for who asks why there was nothing to plan."""
    one = session(MemoryStore())
    one.ask("first", ids(44, 300))
    one.engine.cache.evict()
    assert one.store is not None
    one.store.faults.delay = 10_000
    one.submit("waits", ids(44, 300))
    one.step()
    (load,) = one.store.loading
    plan = one.engine.scheduler.plan

    def plan_then_load() -> Plan:
        planned = plan()
        load.done = True
        return planned

    one.engine.scheduler.plan = plan_then_load  # type: ignore[method-assign]
    one.finish()
    one.check_all()
    assert one.cached["waits"] == 256


def few_snapshots() -> None:
    one = session(pages=200, state={"ladder_tokens": 256, "snapshots": 64})
    one.ask("long", ids(23, 40 * 64 + 1), 1)
    assert one.engine.stats().cache.snapshots <= 8
    assert one.ask("edited", ids(23, 2200) + ids(24, 50), 1) >= 1000


def short_prompts_hit() -> None:
    one = session()
    one.ask("first", ids(25, 100))
    assert one.ask("again", ids(25, 90)) == 64


def names_that_collide() -> None:
    one = session()
    one.ask("first", ids(26, 200))
    one.ask("other", ids(27, 200))
    one.ask("again", ids(26, 200))


def a_snapshot_that_is_lost_below() -> None:
    one = session(MemoryStore())
    one.ask("first", ids(28, 300))
    assert one.store is not None
    for lost in range(4):
        one.engine.cache.evict()
        kind = (Kind.PAGE, Kind.SNAPSHOT)[lost % 2]
        names = [name for name in one.store.stored if name.kind is kind]
        del one.store.stored[names[lost % len(names)]]
        one.ask(f"r{lost}", ids(28, 300))


def strange_items() -> None:
    one = session(MemoryStore())
    one.ask("first", ids(29, 200))
    one.ask("second", ids(30, 200))
    one.engine.cache.evict()
    one.ask("again", ids(29, 200))
    assert one.engine.stats().cache.loads == 1


def aborts_leave_no_place_taken() -> None:
    one = session(state={"snapshots": 2}, step_tokens=64)
    for i in range(6):
        one.submit(f"r{i}", ids(31 + i, 260), 2)
        one.step(i)
        one.engine.abort(f"r{i}")
        one.step()
    one.requests.clear()
    for i in range(2):
        one.ask(f"again{i}", ids(40, 200))
    assert one.cached["again1"] == 192


def tenants_do_not_meet() -> None:
    one = session()
    prompt = ids(41, 200)
    for tenant in ("a", "b", ""):
        each = GenerateRequest(f"r{tenant}", prompt, request("", prompt, 2).params, tenant=tenant)
        one.requests[each.request_id] = each
        one.engine.submit(each)
        one.finish()
        assert one.cached[each.request_id] == 0
    one.check_all()


def small_budgets_keep_to_themselves() -> None:
    store = MemoryStore()
    small = session(store, step_tokens=63)
    small.submit("r", ids(42, 200), 3)
    small.finish()
    session(store).ask("r", ids(42, 200), 3)


def decoded_is_not_prompted() -> None:
    """The same tokens by another path: a replay may not begin from what a prompt has left."""
    one = session(MemoryStore(), pages=40)
    prompt = ids(43, 100)
    answer = oracle().greedy(prompt, 90)
    one.ask("prompted", prompt + answer, 1)
    each = GenerateRequest("decoded", prompt, request("", prompt, 90).params,
                           resume_ids=answer[:80])  # fmt: skip
    one.requests["decoded"] = each
    one.engine.submit(each)
    one.finish()
    rows = oracle().expect((Piece("prompt", tuple(prompt)),), answer)
    assert [one.tap.seen["decoded"][100 + at] for at in range(80, 90)] == rows[80:]


class Pitfall(NamedTuple):
    """thread: where it was seen. scene: fails with the mutant. stops: which error the engine itself
    stops at then; else it serves on, and what the scene checks is not so."""

    thread: str
    scene: Scene
    mutant: mutants.Mutant
    stops: str = ""


PITFALLS = [
    Pitfall("vllm-41292", warm_equals_cold, mutants.transposed_between_chunks),
    Pitfall("vllm-52909", chunked_equals_whole, mutants.cut_off_the_grid),
    Pitfall("vllm-56525", aborted_prefill_then_again, mutants.named_when_scheduled),
    Pitfall("vllm-56524", slot_of_a_stranger, mutants.recycled_slots),
    Pitfall("not finite", what_is_not_finite_is_forgotten, mutants.broken_pages_stay_known),
    Pitfall("vllm-57908", readers_do_not_write, mutants.snapshot_written_in_place),
    Pitfall("vllm-53084", warm_from_below, mutants.stored_from_another_page),
    Pitfall("vllm-52627", warm_from_below, mutants.conv_not_restored),
    Pitfall("vllm-53324", parted_prompts, mutants.snapshot_of_another_length),
    Pitfall("vllm-51094", lengths_around_a_page, mutants.state_of_the_whole_prompt),
    Pitfall("vllm-34587", warm_equals_cold, mutants.saved_at_the_end_of_the_chunk),
    Pitfall("vllm-45704", warm_from_below, mutants.loads_not_waited_for),
    Pitfall("graphs", replayed_right_after_a_load, mutants.graphs_do_not_wait),
    Pitfall("vllm-46014", preempted_while_loading, mutants.stored_without_a_copy),
    Pitfall("vllm-46453", evicted_while_waiting, mutants.begins_where_it_once_could, "KeyError"),
    Pitfall("vllm-49176", loads_that_always_fail, mutants.keeps_believing_in_a_load),
    Pitfall("vllm-44294", others_pass_a_load, mutants.one_load_holds_up_all),
    Pitfall("half", evicted_while_the_rest_is_loaded, mutants.asks_once),
    Pitfall(
        "stalled", a_load_that_ends_inside_a_step, mutants.idle_by_what_still_loads, "EngineStalled"
    ),
    Pitfall("vllm-45845", few_snapshots, mutants.dense_snapshots),
    Pitfall("vllm-40696", short_prompts_hit, mutants.long_blocks),
    Pitfall("vllm-12621", names_that_collide, mutants.weak_names_not_compared),
    Pitfall("sglang-31474", warm_equals_cold, mutants.never_saved),
    Pitfall("sglang-32653", warm_equals_cold, mutants.saved_in_bf16),
    Pitfall(
        "sglang-12693", aborts_leave_no_place_taken, mutants.places_not_given_back, "OwnershipError"
    ),
    Pitfall("mooncake-2236", a_snapshot_that_is_lost_below, mutants.conv_not_restored),
    Pitfall("dynamo-15079", loads_that_always_fail, mutants.failed_counts_as_done),
    Pitfall("tenants", tenants_do_not_meet, mutants.one_tenant_for_all),
    Pitfall("budget", small_budgets_keep_to_themselves, mutants.budget_not_in_the_name),
    Pitfall("path", decoded_is_not_prompted, mutants.path_not_in_the_name),
]
SCENES = {each.__name__: each for each in (*(p.scene for p in PITFALLS), strange_items)}
# Mistakes elsewhere that must not become wrong answers here.
SURVIVED = [
    Pitfall("weak hash", names_that_collide, mutants.weak_names),
    Pitfall("strange items", strange_items, mutants.another_request_s_items),
]


@pytest.mark.parametrize("name", SCENES)
def test_scene(name: str) -> None:
    SCENES[name]()


@pytest.mark.parametrize("pitfall", PITFALLS, ids=lambda each: each.thread)
def test_the_mistake_is_noticed(pitfall: Pitfall, monkeypatch: pytest.MonkeyPatch) -> None:
    pitfall.mutant(monkeypatch)
    failed, fail = list[str](), Engine.fail

    def noted(self: Engine, reason: str) -> list[TokenOutput]:
        failed.append(reason)
        return fail(self, reason)

    monkeypatch.setattr(Engine, "fail", noted)
    with pytest.raises(AssertionError):
        pitfall.scene()
    # A mutant that does not fit the code any more breaks down, and shows nothing.
    assert [reason.split(":")[0] for reason in failed] == pitfall.stops.split()


@pytest.mark.parametrize("pitfall", SURVIVED, ids=lambda each: each.thread)
def test_the_mistake_does_no_harm(pitfall: Pitfall, monkeypatch: pytest.MonkeyPatch) -> None:
    pitfall.mutant(monkeypatch)
    pitfall.scene()
