"""The calls into torch.cuda, in their order, where there is no GPU: a stand-in writes them down."""

from contextlib import contextmanager
from typing import Any

import pytest
import torch

from expertmesh.actors.model.graphs import CudaRecorder
from expertmesh.actors.model.upload import CudaLanes

GPU = torch.device("cuda")


class Calls:
    """A torch.cuda with streams that have names. Events are who made them and when."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.made: list[str] = []
        self.current = "main"
        self._events = self._pools = 0
        calls = self

        class Stream:
            def __init__(self, device: Any = None, name: str = "side") -> None:
                self.name = name

            def wait_stream(self, other: "Stream") -> None:
                calls.made.append(f"{self.name} waits for {other.name}")

            def wait_event(self, event: "Event") -> None:
                calls.made.append(f"{self.name} waits for {event.name}")

            def record_event(self) -> "Event":
                return Event(self.name)

        class Event:
            def __init__(self, stream: str) -> None:
                calls._events += 1
                self.name = f"event {calls._events} of {stream}"

            def synchronize(self) -> None:
                calls.made.append(f"host waits for {self.name}")

        class Graph:
            def capture_begin(self, pool: Any = None, capture_error_mode: str = "global") -> None:
                calls.made.append(f"{calls.current} begins, {pool}, {capture_error_mode}")

            def capture_end(self) -> None:
                calls.made.append(f"{calls.current} ends")

            def replay(self) -> None:
                calls.made.append(f"replay on {calls.current}")

        @contextmanager
        def stream(entered: Stream) -> Any:
            before, calls.current = calls.current, entered.name
            try:
                yield
            finally:
                calls.current = before

        def pool() -> str:
            calls._pools += 1
            return f"pool {calls._pools}"

        patch.setattr(torch.cuda, "Stream", Stream)
        patch.setattr(torch.cuda, "CUDAGraph", Graph)
        patch.setattr(torch.cuda, "stream", stream)
        patch.setattr(torch.cuda, "graph_pool_handle", pool)
        patch.setattr(torch.cuda, "current_stream", lambda device=None: Stream(name=calls.current))

    def run(self) -> str:
        self.made.append(f"work on {self.current}")
        return "result"


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Calls:
    return Calls(monkeypatch)


def test_a_graph_is_recorded_beside_what_computes(calls: Calls) -> None:
    recorder = CudaRecorder(GPU)
    recorder.warm(calls.run)
    assert calls.made == ["side waits for main", "work on side", "main waits for side"]
    calls.made.clear()
    for micro in (0, 1, 0):
        replay, result = recorder.record(micro, calls.run)
        assert result == "result"
    replay()
    expected = []
    for pool in ("pool 1", "pool 2", "pool 1"):
        expected += [f"side begins, {pool}, thread_local", "work on side", "side ends"]
    assert calls.made == [*expected, "replay on main"]


def test_a_recording_that_fails_is_ended(calls: Calls) -> None:
    with pytest.raises(ZeroDivisionError):
        CudaRecorder(GPU).record(0, lambda: 1 / 0)
    assert calls.made[-1] == "side ends" and calls.current == "main"


def test_a_copy_goes_beside_what_computes(calls: Calls) -> None:
    lanes = CudaLanes(GPU)
    source = torch.arange(3)
    target = torch.zeros(3, dtype=torch.int64)
    before = lanes.mark()
    done = lanes.copy(target, source, before)
    lanes.wait(done)
    lanes.copy(target, source, lanes.mark())
    assert torch.equal(target, source)
    assert calls.made == [
        "side waits for event 1 of main",
        "main waits for event 2 of side",
        "host waits for event 2 of side",
        "side waits for event 3 of main",
        "main waits for event 4 of side",
    ]
