"""The autoscaler under simulated load: it follows, does not flap, takes silence for nothing."""

import itertools
import logging
import math
from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from expertmesh.actors.attention.messages import EngineStats
from expertmesh.cluster.autoscaling.pace import Pace
from expertmesh.cluster.autoscaling.policy import Autoscaler
from expertmesh.cluster.autoscaling.settings import (
    AttentionScaling,
    AutoscaleSettings,
    ExpertScaling,
    PaceSettings,
)
from expertmesh.cluster.autoscaling.signals import (
    AttentionSignals,
    ExpertSignals,
    PoolSignals,
    Want,
    occupancy,
)
from expertmesh.cluster.autoscaling.wants import want_attention, want_experts

IDLE_EXPERTS = ExpertSignals(busy_share=0.0, imbalance=1.0, wait_share=0.0, experts=896, slots=448)
IDLE_ATTENTION = AttentionSignals(occupancy=0.0, queued_tokens=0.0)
SETTINGS = AutoscaleSettings()


class Simulation:
    """A mesh whose load is given in units of one member's capacity, second by second."""

    def __init__(self, settings: AutoscaleSettings, experts: int = 3, attention: int = 1) -> None:
        self.scaler, self.experts, self.attention = Autoscaler(settings), experts, attention
        self.history: list[tuple[int, int]] = []
        self.now = 1000.0

    def run(
        self,
        seconds: int,
        expert_load: Callable[[int], float] = lambda second: 0.0,
        kv_load: Callable[[int], float] = lambda second: 0.0,
        queue: Callable[[int], float] = lambda second: 0.0,
        blind: bool = False,
    ) -> None:
        for second in range(seconds):
            busy = min(1.0, expert_load(second) / self.experts)
            used = min(1.0, kv_load(second) / self.attention)
            signals = PoolSignals(
                self.experts,
                self.attention,
                None if blind else replace(IDLE_EXPERTS, busy_share=busy),
                None if blind else AttentionSignals(used, queue(second)),
            )
            decision = self.scaler.decide(signals, self.now)
            if not decision.dry_run:
                self.experts, self.attention = decision.experts, decision.attention
            self.history.append((self.experts, self.attention))
            self.now += 1.0

    def turns(self, pool: int) -> int:
        """How often a pool changed direction."""
        counts = [counts[pool] for counts in self.history]
        steps = [b - a for a, b in itertools.pairwise(counts) if a != b]
        return sum((a > 0) != (b > 0) for a, b in itertools.pairwise(steps))


def test_a_step_of_load_is_followed_within_seconds_and_held() -> None:
    mesh = Simulation(SETTINGS)
    mesh.run(60, expert_load=lambda second: 4.0, kv_load=lambda second: 1.9)
    assert 4.0 / mesh.experts <= SETTINGS.experts.high_busy_share
    assert 1.9 / mesh.attention <= SETTINGS.attention.high_occupancy
    reached = mesh.history.index(mesh.history[-1])
    assert reached <= 2 * SETTINGS.experts.up_cooldown_s
    settled = mesh.history[-1]
    mesh.run(600, expert_load=lambda second: 4.0, kv_load=lambda second: 1.9)
    assert set(mesh.history[60:]) == {settled}


def test_a_ramp_up_and_down_turns_once() -> None:
    mesh = Simulation(SETTINGS)
    mesh.run(600, expert_load=lambda second: second / 100, kv_load=lambda second: second / 250)
    assert mesh.experts == 8
    assert mesh.attention >= 3
    mesh.run(1500, expert_load=lambda second: max(0.0, 6 - second / 100))
    assert (mesh.experts, mesh.attention) == (3, 1)  # 3: room for one loss
    assert mesh.turns(0) == mesh.turns(1) == 1


@pytest.mark.parametrize("period", [4, 20, 60, 110])
def test_load_that_comes_and_goes_for_ten_minutes_does_not_flap(period: int) -> None:
    mesh = Simulation(SETTINGS)

    def wave(second: int) -> float:
        return 3.4 if second % period < period / 2 else 0.3

    mesh.run(600, expert_load=wave, kv_load=lambda second: wave(second) / 2)
    assert mesh.turns(0) == mesh.turns(1) == 0
    assert mesh.experts > 3 or period / 2 <= SETTINGS.experts.up_delay_s


def test_load_slower_than_the_delays_turns_no_faster_than_they_allow() -> None:
    mesh = Simulation(SETTINGS)
    mesh.run(3600, expert_load=lambda second: 4.5 if second % 400 < 200 else 0.3)
    changes = [i for i in range(1, 3600) if mesh.history[i][0] < mesh.history[i - 1][0]]
    assert len(changes) >= 2
    # Each shrinking that had to be taken back makes the next one wait longer.
    assert mesh.turns(0) < 2 * 3600 / 400 - 2


def test_bursts_shorter_than_the_delay_change_nothing() -> None:
    mesh = Simulation(SETTINGS)
    mesh.run(600, expert_load=lambda second: 3.0 if second % 60 < 3 else 1.2)
    assert set(mesh.history) == {(3, 1)}


def test_idle_pools_shrink_one_at_a_time_to_their_least() -> None:
    mesh = Simulation(SETTINGS, experts=8, attention=4)
    mesh.run(3000)
    assert (mesh.experts, mesh.attention) == (3, 1)
    for before, after in itertools.pairwise(mesh.history):
        assert before[0] - after[0] in (0, 1)
        assert before[1] - after[1] in (0, 1)
    assert mesh.history[int(SETTINGS.experts.down_delay_s) - 1] == (8, 4)


def test_silence_changes_nothing_and_starts_the_wait_again() -> None:
    mesh = Simulation(SETTINGS, experts=8, attention=4)
    mesh.run(600, blind=True)
    assert set(mesh.history) == {(8, 4)}
    for _ in range(6):  # one missing reading a minute and a half: never two quiet minutes
        mesh.run(90)
        mesh.run(1, blind=True)
    assert set(mesh.history) == {(8, 4)}


@pytest.mark.parametrize("broken", [math.nan, math.inf])
def test_a_number_that_is_none_counts_as_silence(broken: float) -> None:
    scaler = Autoscaler(SETTINGS)
    for second in range(300):
        signals = PoolSignals(
            6,
            3,
            replace(IDLE_EXPERTS, imbalance=broken),
            replace(IDLE_ATTENTION, occupancy=broken),
        )
        assert not scaler.decide(signals, float(second)).changes(signals)


def test_one_silent_pool_does_not_hold_the_other() -> None:
    scaler = Autoscaler(SETTINGS)
    for second in range(10):
        busy = replace(IDLE_EXPERTS, busy_share=0.95)
        decision = scaler.decide(PoolSignals(4, 2, busy, None), float(second))
        if decision.experts > 4:
            break
    assert decision.experts > 4
    assert decision.attention == 2
    assert "attention replicas 2: not all members answer" in decision.reason


def test_a_lost_member_below_the_least_is_asked_for_without_any_answer() -> None:
    settings = AutoscaleSettings(
        experts=ExpertScaling(min_actors=2), attention=AttentionScaling(min_replicas=2)
    )
    scaler = Autoscaler(settings)
    signals = PoolSignals(1, 0, None, None)
    decision = [scaler.decide(signals, float(second)) for second in range(5)][-2]
    assert (decision.experts, decision.attention) == (2, 2)


def test_nothing_is_decided_while_a_change_is_under_way() -> None:
    scaler = Autoscaler(SETTINGS)
    busy = replace(IDLE_EXPERTS, busy_share=1.0)
    for second in range(60):
        signals = PoolSignals(3, 1, busy, IDLE_ATTENTION, changing=True)
        assert not scaler.decide(signals, float(second)).changes(signals)
    # What was wanted meanwhile has to last anew.
    signals = replace(signals, changing=False)
    assert not scaler.decide(signals, 60.0).changes(signals)


def test_a_dry_run_says_what_it_would_do_and_why(caplog: pytest.LogCaptureFixture) -> None:
    mesh = Simulation(AutoscaleSettings(dry_run=True))
    with caplog.at_level(logging.INFO, "expertmesh.cluster.autoscaling.policy"):
        mesh.run(30, expert_load=lambda second: 2.7)
    assert set(mesh.history) == {(3, 1)}
    text = caplog.messages[0]
    assert text.startswith("dry run, would scale: expert actors 3 -> 5: busy share 0.90 > 0.8")
    # As often as if it had been done, not every second.
    assert len(caplog.messages) == 3


def test_no_expert_tier_leaves_nothing_to_scale_there() -> None:
    scaler = Autoscaler(SETTINGS)
    for second in range(300):
        decision = scaler.decide(PoolSignals(0, 1, None, IDLE_ATTENTION), float(second))
        assert (decision.experts, decision.attention) == (0, 1)


def test_a_pool_without_settings_is_left_alone() -> None:
    scaler = Autoscaler(AutoscaleSettings(experts=None, attention=None))
    busy = replace(IDLE_EXPERTS, busy_share=1.0)
    for second in range(300):
        signals = PoolSignals(1, 0, busy, None)
        assert not scaler.decide(signals, float(second)).changes(signals)


def test_a_shrinking_that_had_to_be_taken_back_makes_the_next_one_wait_longer() -> None:
    """A load that fits fewer members only while it is away: growth, quiet, growth, quiet."""
    pace = Pace(PaceSettings(up_delay_s=0, down_delay_s=10, up_cooldown_s=0, down_cooldown_s=0))
    waits, now, count = [], 0.0, 3
    for _ in range(6):
        began = now
        while pace.follow(count, Want(count - 1, "idle"), now).count == count:
            now += 1.0
        waits.append(now - began)
        now += 1.0
        assert pace.follow(count - 1, Want(count, "busy"), now).count == count
    assert waits == [10.0, 20.0, 40.0, 80.0, 80.0, 80.0]
    # A growth long after the last shrinking was not its fault.
    while pace.follow(count, Want(count - 1, "idle"), now).count == count:
        now += 1.0
    now += 1000.0
    assert pace.follow(count - 1, Want(count, "busy"), now).count == count
    assert pace.patience == 1.0


@pytest.mark.parametrize(
    ("engine", "share"),
    [
        (EngineStats(pages_total=10, pages_free=4, slots_total=4, slots_free=3), 0.6),
        (EngineStats(pages_total=10, pages_free=9, slots_total=4, slots_free=1), 0.75),
        (EngineStats(), 0.0),
    ],
)
def test_occupancy_is_of_what_is_fuller(engine: EngineStats, share: float) -> None:
    assert occupancy(engine) == pytest.approx(share)


@given(
    busy=st.floats(0, 1), imbalance=st.floats(1, 3), wait=st.floats(0, 1), actors=st.integers(1, 20)
)
def test_experts_wanted_stay_in_bounds_and_rest_there(
    busy: float, imbalance: float, wait: float, actors: int
) -> None:
    """Whatever is wanted, the same load on that many actors does not want to go back."""
    settings = ExpertScaling(max_actors=12)
    signals = replace(IDLE_EXPERTS, busy_share=busy, imbalance=imbalance, wait_share=wait)
    wanted = want_experts(signals, actors, settings).count
    assert 3 <= wanted <= 12
    then = replace(signals, busy_share=min(1.0, busy * actors / wanted))
    back = want_experts(then, wanted, settings).count - wanted
    assert (wanted - actors) * back >= 0


@given(used=st.floats(0, 1), queued=st.floats(0, 1e6), replicas=st.integers(1, 8))
def test_replicas_wanted_stay_in_bounds_and_rest_there(
    used: float, queued: float, replicas: int
) -> None:
    settings = AttentionScaling(max_replicas=6)
    wanted = want_attention(AttentionSignals(used, queued), replicas, settings).count
    assert 1 <= wanted <= 6
    then = AttentionSignals(min(1.0, used * replicas / wanted), queued)
    back = want_attention(then, wanted, settings).count - wanted
    assert (wanted - replicas) * back >= 0


@pytest.mark.parametrize(
    ("change", "count", "why"),
    [
        ({"busy_share": 0.5, "imbalance": 2.0}, 7, "busy share 1.00 > 0.8"),
        ({"busy_share": 0.6, "wait_share": 0.7}, 5, "wait share 0.70 > 0.6 at busy share 0.60"),
        ({"busy_share": 0.45, "wait_share": 0.9}, 4, ""),
        ({"busy_share": 0.4, "imbalance": 1.6}, 5, "imbalance 1.60 > 1.5 at busy share 0.64"),
        ({"busy_share": 0.1, "imbalance": 3.0}, 3, "busy share 0.40 < 0.5 with one actor fewer"),
        ({"slots": 200}, 6, "896 experts in 200 slots an actor, with 1 to lose, take 6"),
        ({"busy_share": 0.1}, 3, "busy share 0.13 < 0.5 with one actor fewer"),
    ],
)
def test_reasons_carry_the_numbers(change: dict[str, float], count: int, why: str) -> None:
    want = want_experts(replace(IDLE_EXPERTS, **change), 4, ExpertScaling())
    assert want.count == count
    assert why in want.reason
    assert bool(want.reason) == bool(why)


def test_a_limit_that_stands_in_the_way_is_named() -> None:
    full = AttentionSignals(occupancy=0.95, queued_tokens=0)
    want = want_attention(full, 4, AttentionScaling())
    assert want.reason == "occupancy 0.95 > 0.8, but max_replicas 4"
    queue = AttentionSignals(occupancy=0.1, queued_tokens=20_000)
    assert want_attention(queue, 2, AttentionScaling()).reason == (
        "10000 tokens queued per replica > 4096"
    )


@pytest.mark.parametrize(
    "wrong",
    [
        {"experts": {"min_actors": 4, "max_actors": 3}},
        {"experts": {"low_busy_share": 0.8, "high_busy_share": 0.8}},
        {"attention": {"min_replicas": 0}},
        {"attention": {"min_replicas": 5, "max_replicas": 4}},
        {"attention": {"low_occupancy": 0.9}},
        {"attention": {"low_queued_tokens": 9999}},
        {"experts": {"max_actor": 3}},
        {"period": 3},
    ],
)
def test_settings_that_cannot_work_are_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(ValidationError):
        AutoscaleSettings.model_validate(wrong)
