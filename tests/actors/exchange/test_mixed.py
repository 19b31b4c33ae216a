"""The layout for GPUs, over gloo: two ways in one epoch, the same bits, nothing asked of a device.

The others' tests have it among their layouts; here is what it alone does.
"""

from collections import Counter
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from expertmesh.actors.exchange import whole
from expertmesh.actors.exchange.base import ExchangeError
from expertmesh.actors.exchange.counted import CountedAttention
from expertmesh.actors.exchange.formats import formats_of
from expertmesh.actors.exchange.opening import Opening, StepPlan
from expertmesh.actors.exchange.process_group import Groups
from expertmesh.actors.exchange.replicas import ReplicaChoice
from expertmesh.actors.exchange.roster import Roster, holders
from expertmesh.actors.exchange.settings import ExchangeSettings
from expertmesh.actors.exchange.whole import WholeAttention, WholeExpert
from expertmesh.actors.exchange.wire import Frame, Round, read_headers, write_headers
from expertmesh.kernels.latent_moe.tables import expert_table
from expertmesh.kernels.latent_moe.triton_ops import experts_partial_sum
from expertmesh.kernels.latent_moe.types import Glu
from tests.actors.exchange.test_mesh import expected, one_step, settings, step_of_all
from tests.actors.exchange.toy import Shape, ThreadMesh
from tests.support.fake_device import META, MetaUploads, one_device

# Experts 0, 2 and 6 have two copies, expert 4 three.
COPIES = {layer: [[0, 1, 2, 4], [2, 3, 4, 6], [0, 4, 5, 6]] for layer in (1, 2, 4)}


def mixed_shape(**more: Any) -> Shape:
    return Shape(experts=3, settings=settings("mixed", max_rows=16), **more)


@pytest.fixture
def ways(monkeypatch: pytest.MonkeyPatch) -> Counter:
    """How many rounds went which way; steps of up to 8 rows are few."""
    monkeypatch.setattr(whole, "FEW_ROWS", 8)
    seen: Counter = Counter()
    for name, end in (("whole", WholeAttention), ("counted", CountedAttention)):

        def post(self: Any, *args: Any, name: str = name, post: Any = end.post) -> Any:
            seen[name] += 1
            return post(self, *args)

        monkeypatch.setattr(end, "post", post)
    return seen


def test_both_ways_in_one_epoch_have_the_same_bits(poison: None, ways: Counter) -> None:
    shape = mixed_shape(placed=COPIES)
    with ThreadMesh(shape) as mesh:
        for seed, count in enumerate([3, 30, 8, 9, 1, 16, 0, 5]):
            ways.clear()
            batch = shape.rows(count, seed)
            got = one_step(mesh.exchanges[0], shape, batch)
            assert torch.equal(got, expected(mesh, shape, batch)), f"{count} rows"
            rounds = 3 * max(1, -(-count // 16))
            assert ways == {"whole" if count <= 8 else "counted": rounds}, f"{count} rows"


def test_replicas_choose_the_way_together(poison: None, ways: Counter) -> None:
    """The one with few rows goes the way that the other one's many rows need."""
    shape = mixed_shape(attention=2)
    with ThreadMesh(shape) as mesh:
        for step, counts in enumerate([(3, 8), (2, 30), (0, 5), (9, 0)]):
            batches = [shape.rows(count, 10 * step + r) for r, count in enumerate(counts)]
            got = step_of_all(mesh, shape, batches)
            for r in range(2):
                assert torch.equal(got[r], expected(mesh, shape, batches[r]))
    assert ways["whole"] == 2 * 2 * 3 and ways["counted"] == 2 * 3 * (2 + 1)


def test_narrow_sums_round_alike_both_ways(ways: Counter) -> None:
    """What a decode step gives must not depend on whether a prompt takes part in it."""
    shape = Shape(
        experts=3, settings=settings("mixed", max_rows=16, combine_dtype="float32"), placed=None
    )
    with ThreadMesh(shape) as mesh:
        batch = shape.rows(16)
        many = one_step(mesh.exchanges[0], shape, batch)
        few = one_step(mesh.exchanges[0], shape, tuple(part[:8] for part in batch))
    assert torch.equal(few, many[:, :8])
    assert set(ways) == {"whole", "counted"}


def test_rows_are_counted_at_the_end_of_the_step() -> None:
    shape = Shape(experts=3, num_experts=6, top_k=1, settings=settings("mixed"))
    with ThreadMesh(shape) as mesh:
        for expert in (0, 5, 2, 0):
            one_step(mesh.exchanges[0], shape, shape.rows(2, expert, among=[expert]))
        sent = mesh.exchanges[0].rows_sent
    rows = [sum(work.rows for work in server.work.values()) for server in mesh.servers]
    calls = [sum(work.calls for work in server.work.values()) for server in mesh.servers]
    assert (rows, calls) == ([12, 6, 6], [6, 3, 3])
    assert sent == [24, 24, 24], "every row goes to every actor"


@pytest.mark.parametrize("word", range(8))
def test_a_wrong_header_gives_no_number_and_is_named(
    monkeypatch: pytest.MonkeyPatch, word: int
) -> None:
    """Of the second layer's message to the last actor; both ends find it."""
    shape = mixed_shape()
    with ThreadMesh(shape) as mesh:
        give, calls = WholeAttention._give, Counter()

        def tampered(self: Any, group: Any, buffer: Tensor, splits: Any = None) -> Any:
            calls["give"] += isinstance(self, WholeAttention)
            if calls["give"] == 2 and isinstance(self, WholeAttention):
                buffer.view(3, -1)[2, :64].view(torch.int64)[word] += 1
            return give(self, group, buffer, splits)

        monkeypatch.setattr(WholeAttention, "_give", tampered)
        exchange, batch = mesh.exchanges[0], shape.rows(5)
        exchange.begin_step(5)
        sums = [exchange.combine(exchange.dispatch(layer, *batch)) for layer in shape.layers]
        with pytest.raises(ExchangeError, match="rank 3, layer 2, combine, step 0: header mis"):
            exchange.end_step()
        assert [bool(y.isfinite().all()) for y in sums] == [True, False, True]
        assert sums[1].isnan().all()
        mesh.join()
    error = mesh.server_errors[2]
    assert isinstance(error, ExchangeError)
    assert (error.rank, error.layer, error.phase) == (0, 2, "dispatch")


@pytest.mark.parametrize("word", [0, 2, 6])
def test_a_wrong_count_is_never_received(
    monkeypatch: pytest.MonkeyPatch, ways: Counter, word: int
) -> None:
    shape = mixed_shape()
    with ThreadMesh(shape) as mesh:
        write = Frame.write_header

        def tampered(self: Frame, at: Any, rows: int) -> None:
            write(self, at, rows)
            self.buffer[:64].view(torch.int64)[word] += 5000
            monkeypatch.setattr(Frame, "write_header", write)

        monkeypatch.setattr(Frame, "write_header", tampered)
        with pytest.raises(ExchangeError):
            one_step(mesh.exchanges[0], shape, shape.rows(12))
        mesh.join()
    found = [error for error in mesh.server_errors if "mis" in str(error) or "magic" in str(error)]
    assert [(error.rank, error.phase) for error in found] == [(0, "dispatch")]  # type: ignore[union-attr]


def test_headers_on_a_device_travel_together() -> None:
    frames = [Frame((), 9, torch.device("cpu")) for _ in range(3)]
    at = Round(3, 1, 2, 0, 4)
    write_headers(frames, at, [5, 0, 7])
    host = [frame.buffer.clone() for frame in frames]
    for frame in frames:
        frame.buffer.zero_()
        frame.__dict__["header_on_cpu"] = None  # as of memory that the host cannot reach
    write_headers(frames, at, [5, 0, 7])
    assert all(torch.equal(frame.buffer, kept) for frame, kept in zip(frames, host, strict=True))
    assert [(header.at, header.rows) for header in read_headers(frames)] == [
        (at, 5), (at, 0), (at, 7)
    ]  # fmt: skip


def test_the_device_chooses_copies_as_the_host_does() -> None:
    choice = ReplicaChoice(holders(COPIES[1], 7))
    end = WholeAttention(groups_of(0, torch.device("cpu")), FORMATS, MetaUploads())
    end._tables[1] = choice, torch.from_numpy(choice.orders_RE)
    for seed in range(5):
        ids_TK = Shape().rows(20, seed)[1]
        assert end._owners(1, choice, ids_TK).tolist() == choice.assign(ids_TK).tolist()


class Wire:
    """All-to-all of nothing."""

    def __init__(self) -> None:
        self.calls: list[tuple[list[int], list[int]]] = []

    def alltoall_base(
        self, out: Tensor, into: Tensor, take: list[int], give: list[int], limit: timedelta
    ) -> None:
        assert out.numel() == sum(take) and into.numel() == sum(give)
        self.calls.append((take, give))


FORMATS = formats_of(
    ExchangeSettings(layout="mixed", dispatch_dtype="bfloat16", combine_dtype="float32"),
    64, 3, torch.bfloat16, META,
)  # fmt: skip


def groups_of(rank: int, device: torch.device = META) -> Any:
    roster = Roster(3, 2, 3, COPIES, ("", 0))
    wire = Wire()
    return SimpleNamespace(
        roster=roster, rank=rank, device=device, deadline=timedelta(seconds=1),
        dispatch=wire, combine=wire, wait=lambda *args, **kwargs: None,
    )  # fmt: skip


def test_auto_is_mixed_on_a_gpu() -> None:
    formats = formats_of(ExchangeSettings(), 64, 3, torch.bfloat16, torch.device("cuda"))
    assert formats.layout == "mixed"


def mxfp4(rows: int, columns: int) -> tuple[Tensor, Tensor]:
    sizes = (rows, columns // 2), (rows, columns // 32)
    codes, scales = (torch.empty(size, dtype=torch.uint8, device=META) for size in sizes)
    return codes, scales


@pytest.mark.parametrize("after", [0, 3, 10**9])
def test_a_late_message_is_an_error_and_not_a_hang(after: int) -> None:
    class Work:
        asked = 0

        def is_completed(self) -> bool:
            self.asked += 1
            return self.asked > after

        def wait(self) -> None:
            assert self.asked > after

    if after > 10:
        with pytest.raises(RuntimeError, match="Timed out"):
            Groups._poll(Work(), timedelta(milliseconds=5))
    else:
        Groups._poll(Work(), timedelta(seconds=5))


def test_a_decode_step_asks_the_device_nothing() -> None:
    """Both ends, every layer, on tensors without data; only the end of a step looks at some."""
    plan = StepPlan.of([Opening(3, 0, 0, 11, 1, 0, -1), Opening(3, 0, 1, 4, 1, 0, -1)], 1024)
    assert whole.is_few(plan) and plan.capacity == 16
    layers = (1, 2, 4)
    choice = ReplicaChoice(holders(COPIES[1], 7))
    uploads = MetaUploads()
    attention, expert = groups_of(0), groups_of(2)
    front = WholeAttention(attention, FORMATS, uploads)
    back = WholeExpert(expert, FORMATS, MetaUploads())
    w1, w2, w3 = mxfp4(96, 64), mxfp4(64, 96), mxfp4(96, 64)
    table = expert_table(dict.fromkeys(COPIES[1][0], (w1, w2, w3)), 7, 96, META)
    experts: Any = SimpleNamespace(table=lambda: table)
    glu = Glu("situ", 1.5, 2.0)
    with one_device() as (_, launches):
        front.begin(plan, layers)
        back.begin(plan, layers)
        for at in plan.rounds(layers):
            z_TD = torch.empty(11, 64, dtype=torch.bfloat16, device=META)
            ids_TK = torch.empty(11, 3, dtype=torch.int64, device=META)
            weights_TK = torch.empty(11, 3, device=META)
            chunk = front.post(at, plan.capacity, choice, (z_TD, ids_TK, weights_TK))
            rows = back.receive(at, plan.capacity)
            assert [tuple(part.shape) for part in rows] == [(32, 64), (32, 3), (32, 3)]
            z_ND, ids_NK, weights_NK = rows
            sum_ND = experts_partial_sum(z_ND, ids_NK.long(), weights_NK, experts, glu)
            assert sum_ND.shape == (32, 64)
            back.send(at, plan.capacity, sum_ND)
            sum_TD = front.land(chunk)
            assert sum_TD.shape == (11, 64) and sum_TD.dtype == torch.float32
        assert launches, "the experts' kernels"
        for end in (front.check, back.finish):
            with pytest.raises((RuntimeError, NotImplementedError)):
                end()
    sizes = {tuple(take) for take, _ in attention.dispatch.calls}
    assert len(sizes) == 2, "one size there and one back, whatever the routing"
    assert len(uploads.sent) == 1 + len(layers), "headers once a step, a table per layer once"
