"""The ledger: differences of counters, decay, merging, and numbers without NaN."""

import itertools
import json
import math
import random
import sys
from concurrent.futures import ThreadPoolExecutor

import msgspec
import numpy as np
import pytest

from expertmesh.actors.exchange.counting import RoutingSnapshot
from expertmesh.cluster.ledger.ledger import Ledger
from expertmesh.cluster.ledger.measures import entropy, gini, imbalance, rank_loads
from expertmesh.cluster.ledger.totals import Total
from expertmesh.cluster.ledger.windows import MOST_SOURCES, Window
from expertmesh.cluster.placement import Placement, contiguous_placement

LAYERS, EXPERTS, TOP_K = (3, 5), 8, 2


def snapshot(
    source: str, hits_LE: np.ndarray, steps: int = 1, bad: tuple[int, int] = (0, 0)
) -> RoutingSnapshot:
    hits = np.asarray(hits_LE, "<i8").tobytes()
    return RoutingSnapshot(source, LAYERS, EXPERTS, TOP_K, steps, hits, bad, bad)


def ledger(**options: float) -> Ledger:
    return Ledger(LAYERS, EXPERTS, TOP_K, **options)


def some(seed: int, scale: int = 100) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, scale, (len(LAYERS), EXPERTS))


def test_counters_become_differences() -> None:
    book, first, second = ledger(half_life=1e9), some(1), some(2)
    book.add(snapshot("a", first, 1))
    book.close_window()
    book.add(snapshot("a", first, 1))
    book.add(snapshot("a", first + second, 2))
    book.close_window()
    assert np.allclose(book.loads(), first + second)


def test_a_restarted_replica_begins_at_zero() -> None:
    book, before, after = ledger(half_life=1e9), some(1, 1000), some(2, 10)
    book.add(snapshot("first life", before, 900))
    book.close_window()
    book.add(snapshot("second life", after, 3))
    book.close_window()
    assert np.allclose(book.loads(), before + after)


def test_a_snapshot_that_comes_late_counts_nothing_twice() -> None:
    book, first, second = ledger(half_life=1e9), some(1), some(2)
    book.add(snapshot("a", first + second, 2))
    book.add(snapshot("a", first, 1))
    book.add(snapshot("a", first + second, 2))
    book.close_window()
    assert np.allclose(book.loads(), first + second)


def test_windows_fade_with_the_half_life() -> None:
    book, hits = ledger(half_life=4.0), np.full((len(LAYERS), EXPERTS), 1000)
    total = np.zeros_like(hits)
    for step in range(1, 201):
        total = total + hits
        book.add(snapshot("a", total, step))
        book.close_window()
    decay = 0.5**0.25
    assert np.allclose(book.loads(), 1000 / (1 - decay), rtol=1e-9)


def test_idle_and_quiet_windows_do_not_wash_out_the_past() -> None:
    book, usual = ledger(half_life=2.0), some(1, 1000) + 1000
    total = np.zeros_like(usual)
    for step in range(1, 31):
        total = total + usual
        book.add(snapshot("a", total, step))
        book.close_window()
    settled = book.loads()
    for _ in range(1000):
        book.close_window()
    assert np.array_equal(book.loads(), settled), "idle windows change nothing"
    one = np.zeros_like(usual)
    one[:, 7] = TOP_K
    for step in range(31, 61):
        total = total + one
        book.add(snapshot("a", total, step))
        book.close_window()
    shares, before = book.loads() / book.loads().sum(), settled / settled.sum()
    assert np.abs(shares - before).max() < 0.01, "thirty tokens do not replace thirty windows"


def test_windows_of_replicas_add_up_in_any_order_and_grouping() -> None:
    rng = np.random.default_rng(5)
    windows = [
        Window(rng.integers(0, 9, (2, 4)), *rng.integers(0, 9, (2, 2)), int(rng.integers(9)))
        for _ in range(4)
    ]

    def plain(window: Window) -> list[object]:
        bad = window.bad_weights_L.tolist(), window.bad_rows_L.tolist()
        return [window.hits_LE.tolist(), *bad, window.rows_sent]

    whole = plain(windows[0] + windows[1] + windows[2] + windows[3])
    for order in itertools.permutations(windows):
        a, b, c, d = order
        assert plain((a + b) + (c + d)) == plain(a + (b + (c + d))) == whole


def test_the_order_of_replicas_does_not_matter() -> None:
    loads = []
    for order in itertools.permutations("abc"):
        book = ledger()
        for step in range(1, 6):
            for name in order:
                book.add(snapshot(name, some(ord(name)) * step, step), rows_sent=10 * step)
            book.close_window(1.0)
        loads.append((book.loads().tobytes(), book.report(None).fan_out))
    assert len(set(loads)) == 1


def test_another_model_is_refused_by_name() -> None:
    wrong = RoutingSnapshot("a", (3,), 4, TOP_K, 1, bytes(32), (0,), (0,))
    with pytest.raises(ValueError, match="1 layers x 4 experts"):
        ledger().add(wrong)


def test_replicas_without_end_take_bounded_memory() -> None:
    book = ledger()
    for life in range(5 * MOST_SOURCES):
        book.add(snapshot(f"life {life}", some(life)))
        book.close_window()
    assert len(book._sources._seen) == MOST_SOURCES


# --- actors --------------------------------------------------------------------------------------


def test_rows_and_seconds_of_a_seat_survive_its_actors() -> None:
    book = ledger()
    book.add_actor("expert-0", {3: 100, 5: 50}, {3: 1.0, 5: 0.5})
    book.add_actor("expert-0", {3: 110, 5: 50}, {3: 1.5, 5: 0.5})
    book.add_actor("expert-0", {3: 4, 5: 1}, {3: 0.25, 5: 0.25})  # a new actor
    (load,) = book.actor_loads()
    assert (load.seat, load.rows, load.busy_seconds) == ("expert-0", 165, 2.5)


def test_busy_share_and_removed_seats() -> None:
    book = ledger(half_life=2.0)
    for window in range(1, 40):
        book.add_actor("expert-0", {3: 10 * window}, {3: 2.0 * window, 5: 1.0 * window})
        book.add_actor("expert-1", {3: 10 * window}, {3: 1.0 * window})
        book.close_window(10.0)
    assert book.busy_share() == {"expert-0": pytest.approx(0.3), "expert-1": pytest.approx(0.1)}
    book.keep_actors({"expert-1", "expert-2"})
    assert [load.seat for load in book.actor_loads()] == ["expert-1"]
    assert list(book.busy_share()) == ["expert-1"]


def test_fan_out_is_rows_per_token_and_layer() -> None:
    book, hits = ledger(), np.full((len(LAYERS), EXPERTS), 25)  # 100 tokens in each of 2 layers
    book.add(snapshot("a", hits), rows_sent=330)
    book.close_window()
    book.add(snapshot("a", 2 * hits, 2), rows_sent=660)
    book.close_window()
    assert book.report(None).fan_out == pytest.approx(1.65)


# --- measures ------------------------------------------------------------------------------------


def test_balance_is_taken_over_ranks() -> None:
    """[[10, 2], [10, 2]]: over ranks 6 / 10; over layers, the wrong axis, it would be 1."""
    book = Ledger((0, 1), 2, 1)
    hits = np.array([[10, 2], [10, 2]], "<i8")
    book.add(RoutingSnapshot("a", (0, 1), 2, 1, 1, hits.tobytes(), (0, 0), (0, 0)))
    book.close_window()
    placement = Placement({0: ((0,), (1,)), 1: ((0,), (1,))})
    stats = book.routing_stats(placement)
    assert stats.balancedness_worst == stats.balancedness_mean == pytest.approx(0.6)
    assert [one.imbalance for one in book.report(placement).layers] == [pytest.approx(10 / 6)] * 2


def test_copies_share_the_load_of_an_expert() -> None:
    loads = rank_loads(np.array([12.0, 3.0, 1.0]), [(0, 1), (0, 2)])
    assert loads.tolist() == [9.0, 7.0]
    assert imbalance(loads) == pytest.approx(9 / 8)


def test_gini_and_entropy_against_their_definitions() -> None:
    for seed in range(20):
        load_E = np.random.default_rng(seed).integers(0, 50, 9).astype(float)
        pairs = sum(abs(a - b) for a in load_E for b in load_E)
        assert gini(load_E) == pytest.approx(pairs / (2 * 9 * load_E.sum()))
        shares = [value / load_E.sum() for value in load_E if value]
        plain = -sum(share * math.log(share) for share in shares) / math.log(9)
        assert entropy(load_E[None])[0] == pytest.approx(plain)
    assert gini(np.full(5, 3.0)) == pytest.approx(0)
    assert entropy(np.eye(1, 5))[0] == 0


@pytest.mark.parametrize("actors", [0, 1, 4])
def test_without_load_there_are_no_numbers_and_no_nan(actors: int) -> None:
    placement = contiguous_placement(LAYERS, EXPERTS, actors) if actors else None
    book = ledger()
    for _ in range(3):
        book.add(snapshot("a", np.zeros((len(LAYERS), EXPERTS))))
        book.add_actor("expert-0", {}, {})
        assert book.close_window() == []
    report, stats = book.report(placement), book.routing_stats(placement)
    text = msgspec.json.encode([report, stats]).decode()
    assert "NaN" not in text and "Infinity" not in text
    assert stats.balancedness_worst is stats.balancedness_mean is stats.entropy_min is None
    assert [(one.gini, one.entropy, one.imbalance) for one in report.layers] == [(None,) * 3] * 2


def test_one_loaded_layer_of_two() -> None:
    hits = np.zeros((len(LAYERS), EXPERTS), np.int64)
    hits[1] = 200
    book = ledger()
    book.add(snapshot("a", hits))
    book.close_window()
    stats = book.routing_stats(contiguous_placement(LAYERS, EXPERTS, 2))
    assert stats.balancedness_worst == stats.balancedness_mean == pytest.approx(1)
    assert stats.entropy_min == pytest.approx(1)


def test_the_report_is_json_and_names_unhit_experts() -> None:
    hits = np.full((len(LAYERS), EXPERTS), 400)
    hits[1, 6] = 0
    book = ledger()
    book.add(snapshot("a", hits))
    book.close_window()
    plain = msgspec.to_builtins(book.report(contiguous_placement(LAYERS, EXPERTS, 2), "nano"))
    again = json.loads(json.dumps(plain, allow_nan=False))
    assert [one["unhit"] for one in again["layers"]] == [[], [6]]
    assert again["layers"][1]["rank_loads"] == [1600.0, 1200.0]
    assert [one["layer"] for one in again["layers"]] == list(LAYERS)


def test_a_ledger_at_the_shape_of_k3() -> None:
    """92 layers x 896 experts from four replicas over 64 actors."""
    layers, experts, top_k = tuple(range(1, 93)), 896, 16
    book, rng = Ledger(layers, experts, top_k), np.random.default_rng(0)
    for step in range(1, 3):
        for replica in range(4):
            hits = rng.poisson(900, (92, experts)).astype("<i8") * step
            zero = (0,) * 92
            shot = RoutingSnapshot(
                str(replica), layers, experts, top_k, step, hits.tobytes(), zero, zero
            )
            book.add(shot, rows_sent=step)
        assert book.close_window() == []
    report = book.report(contiguous_placement(layers, experts, 64))
    assert len(report.layers) == 92 and max(report.imbalances) < 1.02
    seen = book._sources._seen.values()
    held = book.loads().nbytes + sum(one.counted.hits_LE.nbytes for one in seen)
    assert held < 5_000_000


def test_random_histories_equal_a_plain_sum() -> None:
    """Replicas start, count, restart and die in any order; nothing is lost or counted twice."""
    rng = random.Random(3)
    for _ in range(20):
        book, truth = ledger(half_life=1e9), np.zeros((len(LAYERS), EXPERTS), np.int64)
        lives: dict[str, tuple[int, np.ndarray]] = {}
        for event in range(60):
            name = rng.choice("abc") + str(event // 20)
            steps, counted = lives.get(name, (0, np.zeros_like(truth)))
            new = some(rng.randrange(1 << 30), 5)
            lives[name] = steps + 1, counted + new
            truth = truth + new
            book.add(snapshot(name, lives[name][1], steps + 1))
            if rng.random() < 0.3:
                book.close_window()
        book.close_window()
        assert np.allclose(book.loads(), truth)


def test_a_total_never_falls() -> None:
    """Prometheus reads a fall as a restart and adds everything again."""
    total = Total()
    assert total.update({"a": 5, "b": 7}) == 12
    assert total.update({"a": 6}) == 13, "b is silent"
    assert total.update({"a": 6, "b": 9}) == 15, "b is back"
    assert total.update({"c": 1}) == 16, "others came"
    for life in range(5 * MOST_SOURCES):
        assert total.update({f"life {life}": 2}) == 16 + 2 * (life + 1)
    assert len(total._last) == MOST_SOURCES


def test_a_total_never_falls_between_threads() -> None:
    """Every front door's scrape is a thread of the keeper."""
    total, readings = Total(), {f"actor {i}": 10 for i in range(50)}
    total.update(readings)
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(4) as scrapes:
            told = {*scrapes.map(total.update, [readings] * 400)}
    finally:
        sys.setswitchinterval(before)
    assert told == {500}
