"""A stall, a death or a disagreement is an error that names the rank, within the deadline."""

import multiprocessing
import os
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from expertmesh.actors.exchange.base import ExchangeError
from expertmesh.actors.exchange.mesh import MeshExchange
from expertmesh.actors.exchange.process_group import open_store
from expertmesh.actors.exchange.rendezvous import RendezvousStore
from expertmesh.actors.exchange.settings import ExchangeSettings
from expertmesh.actors.exchange.wire import Frame
from tests.actors.exchange.toy import HOST, Shape, ThreadMesh, ToyBank, in_threads

DEADLINE = 1.5
LAYOUTS = ["direct", "exact", "padded", "mixed"]
SLEPT = re.compile(r"^voluntary_ctxt_switches:\s+(\d+)$", re.MULTILINE)


def shape_of(layout: str, **more: int) -> Shape:
    return Shape(settings=ExchangeSettings(layout=layout, deadline_s=DEADLINE), **more)


def serve(shape: Shape, address: tuple[str, int], actor: int) -> None:
    torch.set_num_threads(1)
    try:
        shape.expert_rank(shape.roster(address), actor).run()
    except ExchangeError:
        os._exit(3)


@contextmanager
def process_mesh(shape: Shape) -> Iterator[tuple[MeshExchange, list[BaseProcess]]]:
    """One attention rank here, every expert rank in a process of its own."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.actors.exchange.toy"])  # torch is imported once
    store, address = open_store(HOST)
    processes = [
        context.Process(target=serve, args=(shape, address, actor), daemon=True)
        for actor in range(shape.experts)
    ]
    for process in processes:
        process.start()
    exchange = shape.attention_rank(shape.roster(address), 0)
    try:
        yield exchange, processes
    finally:
        exchange.close()
        for process in processes:
            process.join(5)
            if process.is_alive():
                process.kill()
                process.join()
        del store


def steps(
    exchange: MeshExchange, shape: Shape, batch: tuple[Tensor, Tensor, Tensor], n: int
) -> None:
    for _ in range(n):
        exchange.begin_step(batch[0].shape[0])
        for layer in shape.layers:
            exchange.combine(exchange.dispatch(layer, *batch))
        exchange.end_step()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_killed_expert_is_named_at_once(layout: str) -> None:
    shape = shape_of(layout)
    with process_mesh(shape) as (exchange, processes):
        batch = shape.rows(6)
        steps(exchange, shape, batch, 3)
        os.kill(processes[1].pid or 0, signal.SIGKILL)
        began = time.monotonic()
        with pytest.raises(ExchangeError) as caught:
            steps(exchange, shape, batch, 1000)
        assert time.monotonic() - began < DEADLINE + 0.5
        assert caught.value.step >= 3
        assert "closed by peer" in caught.value.reason or "deadline" in caught.value.reason
        if layout not in ("padded", "mixed"):
            assert caught.value.rank == 2 and "expert 1" in str(caught.value)
        processes[0].join(5)
        assert processes[0].exitcode == 3, "the survivor must not wait for ever"
        with pytest.raises(ExchangeError):  # a broken epoch stays broken
            exchange.begin_step(1)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_stopped_expert_is_named_within_the_deadline(layout: str) -> None:
    shape = shape_of(layout)
    with process_mesh(shape) as (exchange, processes):
        batch = shape.rows(6)
        steps(exchange, shape, batch, 3)
        os.kill(processes[1].pid or 0, signal.SIGSTOP)
        began = time.monotonic()
        try:
            with pytest.raises(ExchangeError) as caught:
                steps(exchange, shape, batch, 1000)
            took = time.monotonic() - began
        finally:
            os.kill(processes[1].pid or 0, signal.SIGCONT)
        assert DEADLINE - 0.2 < took < DEADLINE + 1.0
        error = caught.value
        assert (error.layer, error.step) == (shape.layers[0], 3)
        assert "deadline" in error.reason
        if layout not in ("padded", "mixed"):
            assert (error.rank, error.phase) == (2, "combine")


def test_an_idle_mesh_uses_no_processor() -> None:
    """Parked for longer than the deadline, then woken: no polling, no timeout."""
    shape = shape_of("direct")
    with process_mesh(shape) as (exchange, processes):
        batch = shape.rows(6)
        steps(exchange, shape, batch, 3)

        def woken() -> int:
            """Times a thread of an expert rank has gone to sleep; gloo's own wake every 10 ms."""
            tasks = [Path(f"/proc/{process.pid}/task") for process in processes]
            threads = [thread for task in tasks for thread in task.iterdir()]
            ours = [thread for thread in threads if "gloo" not in (thread / "comm").read_text()]
            return sum(int(SLEPT.findall((thread / "status").read_text())[0]) for thread in ours)

        before = woken()
        time.sleep(DEADLINE + 0.5)
        parked = woken() - before
        assert parked < 10, f"{parked} wake-ups in {DEADLINE + 0.5} s: somebody polls"
        steps(exchange, shape, batch, 2)


class FailingBank(ToyBank):
    def partial_sum(self, *args: object) -> Tensor:
        raise ValueError("no such expert")


def test_a_failing_expert_does_not_leave_the_others_waiting() -> None:
    shape = shape_of("direct")
    with ThreadMesh(shape) as mesh:
        mesh.servers[1]._bank = FailingBank(
            dict.fromkeys(shape.layers, ()), shape.num_experts, shape.width
        )
        began = time.monotonic()
        with pytest.raises(ExchangeError, match="rank 2, layer 1, combine, step 0"):
            steps(mesh.exchanges[0], shape, shape.rows(6), 1)
        assert time.monotonic() - began < 1.0
        mesh.join()
        assert isinstance(mesh.server_errors[1], ValueError)


@pytest.mark.parametrize("layout", LAYOUTS[:3])
@pytest.mark.parametrize("field", ["epoch", "step", "layer", "magic", "rows"])
def test_a_wrong_header_is_an_error(
    monkeypatch: pytest.MonkeyPatch, layout: str, field: str
) -> None:
    shape = shape_of(layout)
    with ThreadMesh(shape) as mesh:
        write = Frame.write_header

        def tampered(self: Frame, at: object, rows: int) -> None:
            write(self, at, rows)  # type: ignore[arg-type]
            word = ["magic", "epoch", "step", "layer", "micro", "chunk", "rows"].index(field)
            header = self.buffer[:64].view(torch.int64)
            header[word] += 5000
            monkeypatch.undo()

        monkeypatch.setattr(Frame, "write_header", tampered)
        with pytest.raises(ExchangeError):
            steps(mesh.exchanges[0], shape, shape.rows(6), 1)
        mesh.join()
        found = [
            error
            for error in mesh.server_errors
            if "mismatch" in str(error) or "magic" in str(error)
        ]
        assert len(found) == 1 and isinstance(found[0], ExchangeError)
        assert (found[0].rank, found[0].phase, found[0].step) == (0, "dispatch", 0)


def test_replicas_that_disagree_on_the_step_are_told_so() -> None:
    shape = shape_of("direct", attention=2)
    with ThreadMesh(shape) as mesh:
        mesh.exchanges[1]._control._step = 4
        work = [lambda r=r: mesh.exchanges[r].begin_step(1) for r in range(2)]
        with pytest.raises(ExchangeError, match=r"expected epoch 3, step \d, rank \d"):
            in_threads(work)


def test_a_replica_that_does_not_join_is_named() -> None:
    shape = shape_of("direct", attention=2)
    with ThreadMesh(shape) as mesh:
        began = time.monotonic()
        with pytest.raises(ExchangeError, match="rank 1, layer -1, open, step 0: attention 1"):
            mesh.exchanges[0].begin_step(1)
        assert time.monotonic() - began < DEADLINE + 1.0


def test_a_replica_that_leaves_is_an_error_for_the_others() -> None:
    shape = shape_of("direct", attention=2)
    with ThreadMesh(shape) as mesh:
        mesh.exchanges[1].close()
        with pytest.raises(ExchangeError, match="attention 1"):
            mesh.exchanges[0].begin_step(1)


def test_a_step_that_is_used_wrongly_ends_the_epoch() -> None:
    shape = shape_of("direct")
    batch = shape.rows(4)
    with ThreadMesh(shape) as mesh:
        with pytest.raises(ExchangeError, match="not in the step"):
            mesh.exchanges[0].dispatch(1, *batch)
        mesh.join()
    with ThreadMesh(shape) as mesh:
        mesh.exchanges[0].begin_step(4)
        mesh.exchanges[0].dispatch(1, *batch)
        with pytest.raises(ExchangeError, match="never combined"):
            mesh.exchanges[0].end_step()


def test_the_next_epoch_is_built_beside_the_running_one() -> None:
    shape = shape_of("direct")
    with ThreadMesh(shape) as old, ThreadMesh(shape) as new:
        steps(old.exchanges[0], shape, shape.rows(3), 1)
        steps(new.exchanges[0], shape, shape.rows(5), 1)
        steps(old.exchanges[0], shape, shape.rows(3), 1)


def test_a_rank_that_never_comes_is_an_error() -> None:
    settings = ExchangeSettings(join_deadline_s=1.0)
    shape = Shape(settings=settings)
    _store, address = open_store(HOST)
    began = time.monotonic()
    with pytest.raises(ExchangeError, match="could not join"):
        shape.attention_rank(shape.roster(address), 0)
    assert time.monotonic() - began < 4.0


@pytest.mark.parametrize("layout", LAYOUTS)
def test_ranks_that_disagree_on_the_messages_do_not_meet(layout: str) -> None:
    """Nobody waits for the deadline; who agrees with its peers may learn of it later."""
    one, other = shape_of(layout), Shape(width=16, settings=shape_of(layout).settings)
    _store, address = open_store(HOST)
    roster = one.roster(address)
    makers = [
        partial(one.attention_rank, roster, 0),
        partial(one.expert_rank, roster, 0),
        partial(other.expert_rank, roster, 1),
    ]
    began, ends = time.monotonic(), in_threads([partial(made_or_error, make) for make in makers])
    assert time.monotonic() - began < 5
    assert "the ranks disagree on the messages" in str(ends)
    for end in ends:
        if not isinstance(end, ExchangeError):
            end.close()  # as who forms epochs does when one of them fails


def made_or_error(make: Callable[[], Any]) -> Any:
    try:
        return make()
    except ExchangeError as error:
        return error


def test_a_rank_that_goes_while_an_epoch_forms_is_named_at_once() -> None:
    shape = Shape(attention=2)
    store, address = open_store(HOST)
    roster = shape.roster(address)
    rank = RendezvousStore(address, roster.epoch, "expert 1", 60.0)
    rank.set("hello", "here")
    work = [partial(made_or_error, partial(shape.attention_rank, roster, r)) for r in range(2)]
    timer = threading.Timer(0.2, rank.close)
    timer.start()
    began, errors = time.monotonic(), in_threads(work)
    assert time.monotonic() - began < 5
    assert all("expert 1 has gone before all had met" in str(error) for error in errors)
    with pytest.raises(ExchangeError, match="expert 1 has gone"):
        shape.attention_rank(roster, 1)
    with pytest.raises(RuntimeError, match="Timed out: nobody has set"):  # other epochs go on
        RendezvousStore(address, roster.epoch + 1, "expert 0", 0.1).get("hello")
    store.close()
    with pytest.raises(RuntimeError, match="does not answer"):
        RendezvousStore(address, 9, "expert 0", 1.0)
