"""Routing counts hold exactly the rows that carry a token, whatever carries them."""

from collections.abc import Callable
from functools import partial

import numpy as np
import pytest
import torch
from torch import Tensor

from expertmesh.actors.exchange.base import Exchange, ExchangeError, LocalExchange
from expertmesh.actors.exchange.counting import CountingExchange, RoutingCounts
from expertmesh.actors.model.batch import Batch, Span
from expertmesh.actors.model.config import load_config
from expertmesh.actors.model.loading import LoadSettings
from expertmesh.actors.model.model import Model
from tests.actors.exchange.toy import Rows, Shape, ThreadMesh, in_threads
from tests.support.checkpoints import write_checkpoint

LAYERS, EXPERTS, TOP_K = (1, 2, 4), 7, 3


class Echo:
    """An exchange without experts: the sum is the latent itself, and may be damaged on the way."""

    def __init__(self, damage: Callable[[int, Tensor], Tensor] = lambda layer, y_TD: y_TD) -> None:
        self.damage = damage
        self.joined = 0

    def begin_step(self, rows: int, micros: int = 1) -> None: ...

    def dispatch(
        self, layer: int, z_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor, micro: int = 0
    ) -> Tensor:
        return self.damage(layer, z_TD * weights_TK.sum(1, keepdim=True))

    def combine(self, pending: Tensor) -> Tensor:
        return pending

    def end_step(self) -> None: ...

    def join_step(self) -> None:
        self.joined += 1


def counts() -> RoutingCounts:
    return RoutingCounts(LAYERS, EXPERTS, TOP_K)


def step(exchange: Exchange, batch: Rows, ids: dict[int, Tensor]) -> None:
    """One step in which every layer routes the rows by ids[layer]."""
    z_TD, _, weights_TK = batch
    exchange.begin_step(len(z_TD))
    for layer in LAYERS:
        exchange.combine(exchange.dispatch(layer, z_TD, ids[layer], weights_TK))
    exchange.end_step()


def routed(shape: Shape, sizes: list[int], seed: int = 0) -> list[tuple[Rows, dict[int, Tensor]]]:
    """Steps of these sizes, each layer routed differently."""
    made = []
    for number, size in enumerate(sizes):
        ids = {layer: shape.rows(size, seed + 100 * number + layer)[1] for layer in LAYERS}
        made.append((shape.rows(size, seed + number), ids))
    return made


def expected_hits(steps: list[tuple[Rows, dict[int, Tensor]]]) -> np.ndarray:
    """Counted one by one."""
    hits_LE = np.zeros((len(LAYERS), EXPERTS), np.int64)
    for _, ids in steps:
        for row, layer in enumerate(LAYERS):
            for expert in ids[layer].flatten().tolist():
                hits_LE[row, expert] += 1
    return hits_LE


@pytest.mark.parametrize("actors", [0, 1, 2, 4])
def test_a_thousand_tokens_are_a_thousand_tokens(actors: int) -> None:
    """In one process and over a mesh of 1, 2, 4 actors, with idle joins and a warm-up around."""
    shape = Shape(attention=2, experts=max(1, actors))
    steps = routed(shape, [1, 32, 400, 64, 63, 440])  # 1000, some in several chunks
    count = counts()
    if actors == 0:
        exchange = CountingExchange(shape.oracle(shape.roster(("", 0))), count)
        for batch, ids in steps:
            step(exchange, batch, ids)
    else:
        with ThreadMesh(shape) as mesh:
            busy, idle = (CountingExchange(inner, count) for inner in mesh.exchanges)
            warm_batch, warm_ids = routed(shape, [16], seed=9)[0]
            in_threads([partial(step, busy.inner, warm_batch, warm_ids), idle.join_step])
            for batch, ids in steps:
                in_threads([partial(step, busy, batch, ids), idle.join_step])
    snapshot = count.snapshot()
    assert snapshot.hits_LE().sum(1).tolist() == [1000 * TOP_K] * len(LAYERS)
    assert np.array_equal(snapshot.hits_LE(), expected_hits(steps))
    assert snapshot.steps == len(steps)
    assert snapshot.bad_rows == snapshot.bad_weights == (0, 0, 0)


def test_two_micro_batches_count_as_one_step() -> None:
    shape, count = Shape(), counts()
    exchange = CountingExchange(Echo(), count)
    halves = routed(shape, [100, 5])
    count.start_recording(1000)
    exchange.begin_step(105, 2)
    for layer in LAYERS:
        flying = [
            exchange.dispatch(layer, batch[0], ids[layer], batch[2], micro)
            for micro, (batch, ids) in enumerate(halves)
        ]
        for pending in flying:
            exchange.combine(pending)
    exchange.end_step()
    assert np.array_equal(count.snapshot().hits_LE(), expected_hits(halves))
    trace_NLK = count.stop_recording().ids_NLK()
    whole = [torch.cat([ids[layer] for _, ids in halves]) for layer in LAYERS]
    assert np.array_equal(trace_NLK, torch.stack(whole, 1).numpy())


def test_a_step_that_fails_leaves_no_trace() -> None:
    shape, count = Shape(), counts()

    def fail(layer: int, y_TD: Tensor) -> Tensor:
        if layer == LAYERS[-1]:
            raise ExchangeError(0, layer, "dispatch", 1, "lost")
        return y_TD

    broken, whole = CountingExchange(Echo(fail), count), CountingExchange(Echo(), count)
    steps = routed(shape, [8])
    count.start_recording(100)
    with pytest.raises(ExchangeError):
        step(broken, *steps[0])
    step(whole, *steps[0])
    assert np.array_equal(count.snapshot().hits_LE(), expected_hits(steps))
    assert len(count.stop_recording().ids_NLK()) == 8


def test_a_step_may_skip_layers() -> None:
    shape, count = Shape(), counts()
    exchange = CountingExchange(Echo(), count)
    z_TD, ids_TK, weights_TK = shape.rows(4)
    exchange.begin_step(4)
    exchange.combine(exchange.dispatch(LAYERS[1], z_TD, ids_TK, weights_TK))
    exchange.end_step()
    assert count.snapshot().hits_LE().sum(1).tolist() == [0, 4 * TOP_K, 0]


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_rows_that_are_not_finite_are_counted_where_they_arose(value: float) -> None:
    shape, count = Shape(), counts()
    z_TD, ids_TK, weights_TK = shape.rows(40)
    broken_weights = weights_TK.clone()
    broken_weights[[3, 9], 1] = value

    def damage(layer: int, y_TD: Tensor) -> Tensor:
        if layer == LAYERS[2]:
            y_TD[[0, 5, 39], 2] = value
        return y_TD

    exchange = CountingExchange(Echo(damage), count)
    for _ in range(2):
        exchange.begin_step(40)
        for layer, weights in zip(LAYERS, (weights_TK, broken_weights, weights_TK), strict=True):
            exchange.combine(exchange.dispatch(layer, z_TD, ids_TK, weights))
        exchange.end_step()
    snapshot = count.snapshot()
    assert snapshot.bad_weights == (0, 4, 0)
    assert snapshot.bad_rows == (0, 4, 6)


class DeviceReader:
    """Stands for counting._DeviceReader: where tensors live on a device, nothing may look at them
    before the step ends."""

    def __init__(self, counters: Tensor) -> None:
        self.counters, self.calls = counters, list[str]()

    def before_write(self) -> None:
        self.calls.append("before")

    def after_write(self) -> None:
        self.calls.append("after")

    def request(self) -> None:
        self.calls.append("request")

    def result(self) -> np.ndarray:
        return self.counters.numpy().astype("<i8")


def test_the_way_over_a_device_counts_the_same() -> None:
    """Sums are kept until the step ends; here on the CPU, with a reader that notes its calls."""
    shape, plain, device = Shape(), counts(), counts()
    reader = DeviceReader(device._counters)
    device._reader = reader  # type: ignore[assignment]
    steps = routed(shape, [40, 70])
    for batch, ids in steps:
        batch[2][[1, 7], 0] = float("nan")
        for count in (plain, device):
            step(CountingExchange(Echo(), count), batch, ids)
    assert reader.calls == ["before", "after"] * 2
    ours, oracle = device.snapshot(), plain.snapshot()
    assert reader.calls[-1] == "request"
    assert ours.hits == oracle.hits
    assert ours.bad_weights == oracle.bad_weights == (4, 4, 4)
    assert ours.bad_rows == oracle.bad_rows


def test_large_finite_rows_are_not_taken_for_infinite() -> None:
    count = counts()
    exchange = CountingExchange(Echo(), count)
    z_TD, ids_TK, weights_TK = Shape().rows(8)
    exchange.begin_step(8)
    exchange.combine(
        exchange.dispatch(1, torch.full_like(z_TD, 1e38), ids_TK, torch.ones_like(weights_TK))
    )
    exchange.end_step()
    assert count.snapshot().bad_rows == (0, 0, 0)


def test_a_recording_keeps_whole_tokens_up_to_its_size() -> None:
    shape, count = Shape(), counts()
    exchange = CountingExchange(Echo(), count)
    assert len(count.stop_recording().ids_NLK()) == 0
    steps = routed(shape, [5, 80, 7])
    count.start_recording(60)
    for batch, ids in steps:
        step(exchange, batch, ids)
    assert count.recorded == 60
    trace_NLK = count.stop_recording().ids_NLK()
    whole = torch.cat([torch.stack([ids[la] for la in LAYERS], 1) for _, ids in steps])
    assert np.array_equal(trace_NLK, whole[:60].numpy())
    assert np.array_equal(count.snapshot().hits_LE(), expected_hits(steps))
    step(exchange, *steps[0])
    assert count.recorded == 0, "it was stopped"


def test_snapshots_from_another_thread_hold_whole_steps() -> None:
    shape, count = Shape(), counts()
    exchange = CountingExchange(Echo(), count)
    steps = routed(shape, [3] * 300)
    seen = []

    def drive() -> None:
        for batch, ids in steps:
            step(exchange, batch, ids)

    def look() -> None:
        for _ in range(300):
            seen.append(count.snapshot())

    in_threads([drive, look])
    for snapshot in seen:
        assert snapshot.hits_LE().sum(1).tolist() == [snapshot.steps * 3 * TOP_K] * len(LAYERS)


def test_an_exchange_that_cannot_join_is_left_alone() -> None:
    echo = Echo()
    CountingExchange(echo, counts()).join_step()
    assert echo.joined == 1
    local = CountingExchange(LocalExchange(), counts())
    local.join_step()
    assert not local.peer_waiting


def test_the_model_dispatches_no_padding(tmp_path_factory: pytest.TempPathFactory) -> None:
    """A batch of one row is padded for the kernels; the experts and the counts see one row."""
    folder = write_checkpoint(tmp_path_factory.mktemp("counted") / "tiny", num_hidden_layers=4)
    opened = LoadSettings(model=folder).open()
    config = load_config(folder)
    model = Model(config, opened.kernels, opened.source)
    opened.source.close()
    count = RoutingCounts(config.moe_layers, config.num_experts, config.experts_per_token)
    state = model.new_state(4, 2)
    exchange = CountingExchange(Echo(), count)
    for at in range(3):
        batch = Batch(torch.tensor([5]), [Span(0, 0, 1, at, [0], at > 0)], torch.tensor([0]))
        model.forward(batch, state, exchange)
    hits_LE = count.snapshot().hits_LE()
    assert hits_LE.sum(1).tolist() == [3 * config.experts_per_token] * len(config.moe_layers)
