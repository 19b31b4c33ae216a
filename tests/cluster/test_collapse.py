"""The collapse detector: silent on drifting traffic, quick on injected collapses."""

import logging
from collections.abc import Callable

import numpy as np
import pytest

from expertmesh.actors.exchange.counting import RoutingSnapshot
from expertmesh.cluster.ledger.alarms import MOST_NAMED, Alarm
from expertmesh.cluster.ledger.collapse import FINITE_WINDOWS, CollapseDetector
from expertmesh.cluster.ledger.dead_experts import lambert_w
from expertmesh.cluster.ledger.ledger import Ledger
from expertmesh.cluster.ledger.windows import Window
from tests.support.routing_traffic import Traffic, drifting

Inject = Callable[[np.ndarray], np.ndarray]
LAYER = 2  # where a collapse is injected


def window(hits_LE: np.ndarray, bad_weights: int = 0, bad_rows: int = 0) -> Window:
    weights_L, rows_L = np.zeros((2, len(hits_LE)), np.int64)
    weights_L[LAYER : LAYER + 1], rows_L[LAYER : LAYER + 1] = bad_weights, bad_rows
    return Window(hits_LE, weights_L, rows_L)


def detector(traffic: Traffic) -> CollapseDetector:
    return CollapseDetector(tuple(range(traffic.layers)), traffic.experts)


def alarms_of(traffic: Traffic, windows: range) -> tuple[CollapseDetector, list[Alarm]]:
    watch, alarms = detector(traffic), list[Alarm]()
    for at in windows:
        alarms += watch.observe(window(traffic.hits(at)))
    return watch, alarms


# --- false alarms --------------------------------------------------------------------------------


def test_at_most_one_false_alarm_in_ten_thousand_windows_of_drift() -> None:
    """Domains drift and switch; load between nothing and bursts of ten times the usual."""
    traffic = drifting(10_000, seed=1)
    assert (traffic.tokens_W == 0).sum() > 300, "idle windows are part of it"
    assert ((traffic.tokens_W > 0) & (traffic.tokens_W < 50)).sum() > 200, "near-idle ones too"
    assert traffic.tokens_W.max() > 20 * np.median(traffic.tokens_W), "and bursts"
    _, alarms = alarms_of(traffic, range(10_000))
    assert len(alarms) <= 1, [alarm.line() for alarm in alarms]


@pytest.mark.parametrize(
    "shape",
    [
        {"sigma": 1.0, "domains": 3},
        {"experts": 16, "layers": 7, "tokens": 500.0},
        {"experts": 64, "tokens": 20_000.0},
        {"layers": 1},
    ],
    ids=["strong domains", "nano", "busy", "one layer"],
)
def test_no_false_alarm_on_other_shapes(shape: dict[str, float]) -> None:
    traffic = drifting(800, seed=2, **shape)  # type: ignore[arg-type]
    watch, alarms = alarms_of(traffic, range(800))
    assert [alarm.line() for alarm in alarms] == []
    assert not any(watch.active().values())


# --- injected collapses --------------------------------------------------------------------------


def silence(count: int) -> Inject:
    """Experts of middling popularity, always the same; the others get their tokens."""
    dead_N = np.zeros(0, np.int64)

    def inject(shares_LE: np.ndarray) -> np.ndarray:
        nonlocal dead_N
        if not len(dead_N):
            begin = (shares_LE.shape[1] - count) // 2
            dead_N = np.argsort(-shares_LE[LAYER])[begin : begin + count]
        shares_LE[LAYER, dead_N] = 0
        return shares_LE

    return inject


def only(count: int, layers: slice = slice(LAYER, LAYER + 1)) -> Inject:
    """Everything goes to a few experts."""

    def inject(shares_LE: np.ndarray) -> np.ndarray:
        for row_E in shares_LE[layers]:
            row_E[np.argsort(-row_E)[count:]] = 0
        return shares_LE

    return inject


def pull(part: float, count: int = 4) -> Inject:
    """Most tokens choose the same few experts, the others as before."""

    def inject(shares_LE: np.ndarray) -> np.ndarray:
        shares_LE[LAYER] *= 1 - part
        shares_LE[LAYER, :count] += part / count
        return shares_LE

    return inject


def sharpen(power: float) -> Inject:
    """The router has become too sure."""

    def inject(shares_LE: np.ndarray) -> np.ndarray:
        shares_LE[LAYER] **= power
        return shares_LE

    return inject


KINDS: dict[str, tuple[Callable[[], Inject], str]] = {
    "one expert": (lambda: silence(1), "dead_expert"),
    "three experts": (lambda: silence(3), "dead_expert"),
    "half of the experts": (lambda: silence(16), "dead_expert"),
    "only four left": (lambda: only(4), "entropy_drop"),
    "only eight left": (lambda: only(8), "entropy_drop"),
    "four take three quarters": (lambda: pull(0.75), "entropy_drop"),
    "a router too sure": (lambda: sharpen(4), "entropy_drop"),
    "all layers": (lambda: only(4, slice(None)), "entropy_drop"),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", range(6))
def test_an_injected_collapse_is_found_within_two_windows(kind: str, seed: int) -> None:
    make, expected = KINDS[kind]
    inject = make()
    traffic = drifting(400, sigma=0.5, seed=100 + seed)
    usual = (traffic.tokens_W > 1000) & (traffic.tokens_W < 4000)
    begin = int(np.flatnonzero(usual[200:-1] & usual[201:])[seed]) + 200
    watch, before = alarms_of(traffic, range(begin))
    assert before == []
    found = list[Alarm]()
    for at in (begin, begin + 1):
        shares_LE = inject(traffic.shares(at).copy())
        shares_LE /= shares_LE.sum(1, keepdims=True)
        found += watch.observe(window(traffic.hits(at, shares_LE)))
    assert (expected, LAYER) in {(alarm.kind, alarm.layer) for alarm in found}
    if kind != "all layers":
        assert {alarm.layer for alarm in found} == {LAYER}
    if expected == "dead_expert":
        dead = set(np.flatnonzero(shares_LE[LAYER] == 0).tolist())
        assert {expert for alarm in found for expert in alarm.experts} <= dead
        assert set(np.flatnonzero(watch.dead_LE[LAYER]).tolist()) == dead
    assert watch.active()[expected] > 0


def test_an_alarm_is_told_once_and_ends_with_its_cause() -> None:
    traffic = drifting(300, sigma=0.5, seed=4)
    watch, _ = alarms_of(traffic, range(150))
    told, inject = list[Alarm](), silence(2)
    for at in range(150, 220):
        shares_LE = inject(traffic.shares(at).copy())
        told += watch.observe(window(traffic.hits(at, shares_LE / shares_LE.sum(1)[:, None])))
    deaths = [alarm for alarm in told if alarm.kind == "dead_expert"]
    dead = {expert for alarm in deaths for expert in alarm.experts}
    assert sum(alarm.count for alarm in deaths) == len(dead), "no expert twice"
    assert watch.raised["dead_expert"] == len(deaths)
    assert watch.active()["dead_expert"] == int(watch.dead_LE.sum()) > 0
    for at in range(220, 230):
        watch.observe(window(traffic.hits(at)))
    assert watch.active()["dead_expert"] == 0


def test_a_collapse_under_little_load_is_found_when_the_hits_have_added_up() -> None:
    """One sequence per window: far too little for a verdict in one window or two."""
    traffic = drifting(4000, sigma=0.5, tokens=100, seed=5)
    watch, before = alarms_of(traffic, range(2000))
    assert before == []
    inject = silence(1)
    for at in range(2000, 4000):
        shares_LE = inject(traffic.shares(at).copy())
        watch.observe(window(traffic.hits(at, shares_LE / shares_LE.sum(1)[:, None])))
        if watch.dead_LE.any():
            break
    assert np.array_equal(watch.dead_LE, shares_LE == 0)
    assert 2002 < at < 2300


# --- NaN and Inf ---------------------------------------------------------------------------------


def test_rows_that_are_not_finite_alarm_in_their_window() -> None:
    traffic = drifting(100, seed=6)
    watch = detector(traffic)
    assert watch.observe(window(traffic.hits(0))) == []
    (router,) = watch.observe(window(traffic.hits(1), bad_weights=3, bad_rows=3))
    assert (router.kind, router.layer, router.value) == ("router_nonfinite", LAYER, 3)
    (expert,) = watch.observe(window(traffic.hits(2), bad_rows=2))
    assert (expert.kind, expert.layer, expert.value) == ("expert_nonfinite", LAYER, 2)
    assert watch.observe(window(traffic.hits(3), bad_rows=1)) == [], "still the same alarm"
    for at in range(4, 4 + FINITE_WINDOWS):
        assert watch.active()["expert_nonfinite"] == 1
        assert watch.observe(window(traffic.hits(at))) == []
    assert not any(watch.active().values())
    assert watch.raised == {"router_nonfinite": 1, "expert_nonfinite": 1}


def test_nan_alarms_even_in_an_idle_window() -> None:
    watch = CollapseDetector((0, 1, 2, 3), 8)
    idle = np.zeros((4, 8), np.int64)
    assert [alarm.kind for alarm in watch.observe(window(idle, bad_rows=1))] == ["expert_nonfinite"]


# --- what people see -----------------------------------------------------------------------------


def test_the_log_names_layer_and_experts_on_a_bounded_line(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Through the ledger, as the keeper feeds it; layers by their absolute numbers."""
    layers, experts, top_k = (7, 8, 9), 512, 8
    book, total = Ledger(layers, experts, top_k), np.zeros((3, 512), np.int64)
    rng = np.random.default_rng(0)
    for step in range(40):
        hits = rng.poisson(2000, (3, 512))
        if step >= 38:
            hits[1, 100:400] = 0
        total = total + hits
        zero = (0, 0, 0)
        book.add(RoutingSnapshot("a", layers, experts, top_k, step, total.tobytes(), zero, zero))
        with caplog.at_level(logging.WARNING):
            alarms = book.close_window()
        assert bool(alarms) == (step == 38)
    (line,) = [record.getMessage() for record in caplog.records if "no hits" in record.getMessage()]
    assert "layer 8" in line and "100, 101" in line and f"{300 - MOST_NAMED} more" in line
    assert len(line) < 400
    stats = book.routing_stats(None)
    assert stats.dead_experts == stats.alarms_active["dead_expert"] == 300
    assert stats.alarms["dead_expert"] == 1
    assert book.report(None).layers[1].dead == list(range(100, 400))


def test_lambert_w_inverts_its_definition() -> None:
    w = np.concatenate([[0.0], np.logspace(-8, 1.5, 200)])
    assert np.allclose(lambert_w(w * np.exp(w)), w, rtol=1e-9, atol=1e-12)
