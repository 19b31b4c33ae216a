"""Recorded decode passes give the bits of computed ones, out of memory that lies still."""

from pathlib import Path
from typing import Any

import pytest
import torch

from expertmesh.actors.attention.warm_up import warm_up
from expertmesh.actors.model import graphs
from expertmesh.actors.model.batch import Batch, Span
from expertmesh.actors.model.forward import EagerRunner
from expertmesh.actors.model.graphs import Bucket, GraphRunner, GraphsUnavailable, bucket_of
from expertmesh.actors.model.model import RoutingTrace
from expertmesh.kernels.registry import OPERATORS
from tests.support.checkpoints import write_checkpoint
from tests.support.graph_tape import Tape
from tests.support.padded_kernels import padded_torch
from tests.support.runner import Runner

SLOTS = 6


@pytest.fixture(scope="module", params=["kimi_k3", "kimi_linear"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp(request.param)
    return write_checkpoint(made, family=request.param, vocab_size=331, num_experts=7)


class Pair:
    """The same model computed call by call, and replayed."""

    def __init__(self, folder: Path) -> None:
        self.eager = Runner(folder, slots=SLOTS)
        self.tape = Tape()
        self.graphs = Runner(folder, slots=SLOTS, kernels=padded_torch(self.tape.opaque))
        model = self.graphs.model
        self.runner = GraphRunner(model, EagerRunner(model, model.uploads), self.tape)
        model.runner = self.runner

    def prefill(self, *lengths: int) -> None:
        for slot, length in enumerate(lengths):
            ids = [(7 * i + slot) % 320 for i in range(length)]
            assert torch.equal(self.eager.prefill(slot, ids), self.graphs.prefill(slot, ids))

    def decode(self, *slots: int, ping_pong: bool = False) -> None:
        work = [(slot, [11 + slot + self.eager.length[slot] % 50], True) for slot in slots]
        expected = self.eager.step(work)
        got = self.graphs.step(work, ping_pong=ping_pong)
        assert torch.equal(got, expected), f"slots {slots}"
        for ours, theirs in zip(
            self.graphs.state.tensors(), self.eager.state.tensors(), strict=True
        ):
            assert torch.equal(ours, theirs), f"state after slots {slots}"


def test_replays_have_the_bits_of_the_eager_pass(folder: Path) -> None:
    """Rows come and go within a bucket, buckets alternate, contexts cross a page."""
    pair = Pair(folder)
    pair.prefill(3, 62, 64, 130, 1, 7)
    for slots in [(0,), (1, 2), (1,), (0, 1, 2, 3), (5, 0, 3), (0, 1, 2, 3, 4), (4,), (1, 2, 4)]:
        pair.decode(*slots)
    assert pair.tape.warmed == len(pair.runner.buckets)


def test_a_bucket_is_recorded_once(folder: Path) -> None:
    pair = Pair(folder)
    pair.prefill(5, 6, 7, 8)
    for slots in [(0,), (1, 2, 3), (2, 0)]:
        pair.decode(*slots)
    assert pair.runner.buckets == [Bucket(4, 8, 0)]
    recorded = len(pair.tape.recorded)
    assert pair.tape.replays == 3 * recorded, "one launch a piece and step"
    moe = len(pair.eager.config.moe_layers)
    assert recorded == 2 * moe + 1, "a graph between two exchanges, one of the shared experts"
    assert min(pair.tape.recorded) > 0


def test_prompts_and_mixed_steps_are_not_recorded(folder: Path) -> None:
    pair = Pair(folder)
    pair.prefill(5, 6)
    work = [(0, [1], True), (2, [5, 6, 7], False)]
    assert torch.equal(pair.eager.step(work), pair.graphs.step(work))
    assert not pair.runner.buckets


def test_what_fits_no_bucket_runs_eagerly(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graphs, "MOST_ROWS", 4)
    pair = Pair(folder)
    pair.prefill(5, 6, 7, 8, 9)
    pair.decode(0, 1, 2, 3, 4)
    assert not pair.runner.buckets
    monkeypatch.setattr(graphs, "MOST_PAGES", 1)
    pair.graphs.prefill(5, list(range(65)))
    pair.eager.prefill(5, list(range(65)))
    pair.decode(5)
    assert not pair.runner.buckets
    pair.decode(0)
    assert pair.runner.buckets == [Bucket(4, 8, 0)]


def test_micro_batches_have_graphs_of_their_own(folder: Path) -> None:
    pair = Pair(folder)
    pair.prefill(5, 6, 70, 8)
    for slots in [(0, 1, 2, 3), (3, 1), (2, 0, 1, 3)]:
        pair.decode(*slots, ping_pong=True)
    assert {bucket.micro for bucket in pair.runner.buckets} == {0, 1}


def test_another_state_is_recorded_anew(folder: Path) -> None:
    """Graphs know addresses: those of a state that is gone must never be used."""
    pair = Pair(folder)
    pair.prefill(5)
    pair.decode(0)
    for runner in (pair.eager, pair.graphs):
        runner.state = runner.model.new_state(SLOTS * 4, SLOTS)
        runner.length = [0] * SLOTS
    pair.prefill(9)
    pair.decode(0)
    assert pair.tape.warmed == 2
    assert pair.runner.buckets == [Bucket(4, 8, 0)]


def test_a_warmed_up_model_has_computed_and_recorded_once(folder: Path) -> None:
    pair = Pair(folder)
    warm_up(pair.graphs.model)
    assert pair.runner.buckets == [Bucket(4, 8, 0)] and pair.tape.replays
    pair.prefill(5)
    pair.decode(0)
    assert pair.tape.warmed == 2, "over another state"


def test_a_recording_that_fails_costs_no_request(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    pair = Pair(folder)
    pair.prefill(5, 6, 7, 8, 9)
    pair.decode(0)
    record, calls = pair.tape.record, []

    def fail(*args: Any) -> Any:
        calls.append(args)
        if len(calls) == 2:
            raise RuntimeError("out of memory")
        return record(*args)

    monkeypatch.setattr(pair.tape, "record", fail)
    for slots in [(0, 1, 2, 3, 4), (1, 2), (4, 3, 2, 1, 0)]:
        pair.decode(*slots)
    assert len(calls) == 2, "it is not tried again"
    assert "out of memory" in caplog.text
    assert pair.runner.buckets == [Bucket(4, 8, 0)]


def test_wanted_rows_and_the_trace_come_without_padding(folder: Path) -> None:
    pair = Pair(folder)
    pair.prefill(5, 6, 7)
    spans = [Span(slot, slot, 1, 5 + slot, pair.eager.pages[slot][:1], True) for slot in range(3)]
    batch = Batch(torch.tensor([1, 2, 3]), spans, torch.tensor([0, 2]))
    made = []
    for runner in (pair.eager, pair.graphs):
        trace = RoutingTrace()
        logits = runner.model.forward(batch, runner.state, runner.exchange, trace)
        made.append((logits, trace.rows(0, 3)))
    assert torch.equal(made[0][0], made[1][0])
    assert torch.equal(made[0][1], made[1][1])


def test_buckets() -> None:
    def batch(rows: int, position: int, decode: bool = True) -> Batch:
        pages = list(range(position // 64 + 1))
        spans = [Span(row, row, 1, position, pages, decode) for row in range(rows)]
        return Batch(torch.zeros(rows, dtype=torch.int64), spans, torch.arange(rows))

    assert bucket_of(batch(1, 0), 0) == Bucket(4, 8, 0)
    assert bucket_of(batch(5, 63), 1) == Bucket(8, 8, 1)
    assert bucket_of(batch(256, 64 * 8), 0) == Bucket(256, 64, 0)
    assert bucket_of(batch(257, 0), 0) is None
    assert bucket_of(batch(3, 0, decode=False), 0) is None
    assert bucket_of(batch(0, 0), 0) is None


def test_graphs_asked_for_where_they_cannot_be(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = Runner(folder).model
    assert isinstance(graphs.runner_for(model, "auto"), EagerRunner)
    assert isinstance(graphs.runner_for(model, "off"), EagerRunner)
    with pytest.raises(GraphsUnavailable, match="the device is cpu"):
        graphs.runner_for(model, "on")
    served = dict.fromkeys(OPERATORS, "triton") | {"route": "torch", "pack_linear": "torch"}
    monkeypatch.setattr(graphs, "resolve", lambda kernels, device_type: served)
    with pytest.raises(GraphsUnavailable, match="recorded: route would ask the host"):
        graphs.wanted("on", "auto,route=torch", "cuda")
    assert not graphs.wanted("auto", "auto,route=torch", "cuda")
    served["route"] = "triton"
    assert graphs.wanted("auto", "auto", "cuda") and graphs.wanted("on", "auto", "cuda")
