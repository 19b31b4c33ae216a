"""Recorded traffic: the file, who was counted, fan-out and co-activation."""

import io
from pathlib import Path

import numpy as np
import pytest

from expertmesh.actors.exchange.counting import RoutingSnapshot, Trace
from expertmesh.cluster.ledger.coactivation import coactivation, top_pairs
from expertmesh.cluster.ledger.recording import (
    FORMAT,
    Recording,
    RecordingError,
    assemble,
    holds_of,
    load_recording,
)
from expertmesh.cluster.placement import Placement, contiguous_placement

LAYERS, EXPERTS, TOP_K = (2, 3, 7), 12, 3


def choices(tokens: int, seed: int = 0) -> np.ndarray:
    """int16 [N, L, K], distinct experts per token and layer."""
    rng = np.random.default_rng(seed)
    return rng.random((tokens, len(LAYERS), EXPERTS)).argsort(2)[:, :, :TOP_K].astype(np.int16)


def hits_of(trace_NLK: np.ndarray) -> np.ndarray:
    return np.stack(
        [np.bincount(ids.ravel(), minlength=EXPERTS) for ids in trace_NLK.swapaxes(0, 1)]
    )


def recording(trace_NLK: np.ndarray, placement: Placement | None = None) -> Recording:
    holds = holds_of(placement, LAYERS, EXPERTS)
    return Recording(LAYERS, EXPERTS, TOP_K, 1.5, hits_of(trace_NLK), trace_NLK, holds, "nano")


def snapshot(source: str, hits_LE: np.ndarray) -> RoutingSnapshot:
    zero = (0,) * len(LAYERS)
    packed = hits_LE.astype("<i8").tobytes()
    return RoutingSnapshot(source, LAYERS, EXPERTS, TOP_K, 1, packed, zero, zero)


def trace(ids_NLK: np.ndarray) -> Trace:
    return Trace(LAYERS, EXPERTS, TOP_K, ids_NLK.astype("<i2").tobytes())


@pytest.mark.parametrize("actors", [0, 1, 4])
@pytest.mark.parametrize("tokens", [0, 50])
def test_a_file_gives_back_what_was_recorded(tmp_path: Path, actors: int, tokens: int) -> None:
    placement = contiguous_placement(LAYERS, EXPERTS, actors) if actors else None
    made, path = recording(choices(tokens), placement), tmp_path / "traffic.npz"
    path.write_bytes(made.to_bytes())
    read = load_recording(path)
    assert (read.layers, read.experts, read.top_k, read.seconds, read.model) == (
        LAYERS, EXPERTS, TOP_K, 1.5, "nano",
    )  # fmt: skip
    assert np.array_equal(read.hits_LE, made.hits_LE)
    assert read.trace_NLK.dtype == np.int16 and np.array_equal(read.trace_NLK, made.trace_NLK)
    assert read.placement == placement
    with np.load(path) as arrays:
        assert str(arrays["format"]) == FORMAT
        assert arrays["tokens"].tolist() == [tokens] * len(LAYERS)


def test_replicas_are_merged_and_only_the_time_between_counts() -> None:
    a, b, c = choices(20, 1), choices(30, 2), choices(5, 3)
    old, gone = hits_of(choices(100, 4)), hits_of(choices(9, 5))
    before = [snapshot("a", old), snapshot("gone", gone)]
    after = [snapshot("new", hits_of(b)), snapshot("a", old + hits_of(a) + hits_of(c))]
    made = assemble(before, after, [trace(a), trace(b)], None, 2.0, tokens=40, model="m")
    assert np.array_equal(made.hits_LE, hits_of(a) + hits_of(b) + hits_of(c))
    assert np.array_equal(made.trace_NLK, np.concatenate([a, b])[:40])
    assert made.placement is None and made.fan_out() is None


@pytest.mark.parametrize("actors", [1, 2, 3, 5])
def test_fan_out_counts_distinct_actors(actors: int) -> None:
    placement = contiguous_placement(LAYERS, EXPERTS, actors)
    ids = choices(150, actors)
    owner = {
        (layer, expert): actor
        for layer in LAYERS
        for actor, held in enumerate(placement.held[layer])
        for expert in held
    }
    distinct = [
        len({owner[layer, int(expert)] for expert in token[row]})
        for token in ids
        for row, layer in enumerate(LAYERS)
    ]
    assert recording(ids, placement).fan_out() == pytest.approx(np.mean(distinct))


def test_a_report_of_a_file_has_pairs_and_balance() -> None:
    ids = choices(400, 6)
    ids[:200, 1] = [4, 9, 0]  # together far more often than chance
    report = recording(ids, contiguous_placement(LAYERS, EXPERTS, 3)).report(pairs=3)
    assert report.windows == 0 and report.fan_out is not None and 1 < report.fan_out < 3
    best = report.layers[1].pairs
    assert {(pair.first, pair.second) for pair in best} == {(0, 4), (0, 9), (4, 9)}
    assert all(pair.tokens >= 200 and pair.lift > 1.2 for pair in best)
    assert [one.layer for one in report.layers] == list(LAYERS)
    assert sum(report.layers[0].rank_loads) == 400 * TOP_K


def test_coactivation_against_counting_by_hand() -> None:
    ids = choices(60, 7)[:, 0]
    by_hand = np.zeros((EXPERTS, EXPERTS), np.int64)
    for token in ids.tolist():
        for first in token:
            for second in token:
                by_hand[first, second] += 1
    assert np.array_equal(coactivation(ids, EXPERTS), by_hand)
    assert top_pairs(by_hand, 0) == []
    assert top_pairs(np.diag(np.full(EXPERTS, 15)), 60) == [], "never together is below chance"


def changed(**arrays: object) -> bytes:
    with np.load(io.BytesIO(recording(choices(4)).to_bytes())) as whole:
        kept = {name: whole[name] for name in whole.files} | arrays
    file = io.BytesIO()
    np.savez(file, **{name: value for name, value in kept.items() if value is not None})  # type: ignore[arg-type]
    return file.getvalue()


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (b"not a zip file at all", "not a routing recording"),
        (b"", "not a routing recording"),
        (recording(choices(4)).to_bytes()[:200], "not a routing recording"),
        (changed(format=np.array("other-2")), "format other-2"),
        (changed(trace=None), "trace"),
        (changed(hits=np.zeros((2, EXPERTS), np.int64)), "hits of shape"),
        (changed(trace=np.zeros((4, 3, 9), np.int16)), "a trace of shape"),
        (changed(trace=np.full((4, 3, TOP_K), EXPERTS, np.int16)), "expert ids 12 to 12"),
        (changed(holds=np.zeros((3, 2, 5), bool)), "a placement of shape"),
    ],
)
def test_a_damaged_file_is_refused_by_name(tmp_path: Path, damage: bytes, says: str) -> None:
    path = tmp_path / "broken.npz"
    path.write_bytes(damage)
    with pytest.raises(RecordingError, match=says) as refusal:
        load_recording(path)
    assert "broken.npz" in str(refusal.value)
