"""Copies out of page-locked memory, on a device whose two streams run as unluckily as they may."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

from expertmesh.actors.model.upload import KEPT, SMALLEST, HostUploads, PinnedUploads


class Unlucky:
    """Lanes (actors/model/upload.py) on the host. hasty: copies run as soon as they may and what
    computes as late as it may; else copies run as late as they may."""

    def __init__(self, hasty: bool) -> None:
        self._hasty = hasty
        self._computing: list[Callable[[], None]] = []
        self._done = 0
        self._copies: list[Callable[[], None]] = []
        self._copied = 0
        self.waits = 0

    def memory(self, size: int) -> tuple[Tensor, Tensor]:
        return torch.zeros(size, dtype=torch.uint8), torch.zeros(size, dtype=torch.uint8)

    def mark(self) -> int:
        return len(self._computing)

    def copy(self, target: Tensor, source: Tensor, after: int) -> int:
        def run() -> None:
            self._compute(after)
            target.copy_(source)

        self._copies.append(run)
        number = len(self._copies)
        if self._hasty:
            self._copy(number)
        self._computing.append(lambda: self._copy(number))
        return number

    def wait(self, mark: int) -> None:
        self.waits += self._copied < mark
        self._copy(mark)

    def compute(self, work: Callable[[], None]) -> None:
        self._computing.append(work)

    def finish(self) -> None:
        self._compute(len(self._computing))

    def _compute(self, until: int) -> None:
        while self._done < until:
            self._done += 1
            self._computing[self._done - 1]()

    def _copy(self, until: int) -> None:
        while self._copied < until:
            self._copied += 1
            self._copies[self._copied - 1]()


def arrays(call: int) -> tuple[np.ndarray, ...]:
    return (
        np.arange(3) + 100 * call,
        np.full((2, 2), call, np.float32),
        np.full(1 + call % 3, call + 0.5),
        np.full((1, 3), -call, np.int32),
    )


@pytest.mark.parametrize("hasty", [True, False])
@pytest.mark.parametrize("lag", [0, 1, KEPT])
def test_what_was_sent_is_what_is_read(hasty: bool, lag: int) -> None:
    """Each call's tensors are last used after `lag` more calls."""
    lanes = Unlucky(hasty)
    uploads = PinnedUploads(lanes)
    read: list[list[Tensor]] = []
    sent: list[list[Tensor]] = []

    def use(tensors: list[Tensor]) -> None:
        lanes.compute(lambda: read.append([tensor.clone() for tensor in tensors]))

    for call in range(40):
        sent.append(uploads.send(*arrays(call)))
        if call >= lag:
            use(sent[call - lag])
    lanes.finish()
    assert len(read) == 40 - lag
    for call, tensors in enumerate(read):
        for tensor, array in zip(tensors, arrays(call), strict=True):
            assert torch.equal(tensor, torch.from_numpy(array)), f"call {call}"
    if hasty:
        assert lanes.waits == 0, "the host never waits for a copy that could have been made"


def test_what_is_kept_outlives_all_calls() -> None:
    lanes = Unlucky(True)
    uploads = PinnedUploads(lanes)
    kept = uploads.keep(*arrays(3))
    for call in range(20):
        uploads.send(*arrays(call))
    for tensor, array in zip(kept, arrays(3), strict=True):
        assert torch.equal(tensor, torch.from_numpy(array))


def test_large_arrays_get_memory_of_their_own() -> None:
    lanes = Unlucky(True)
    uploads = PinnedUploads(lanes)
    for size in (10, SMALLEST, 3, 3 * SMALLEST):
        array = np.arange(size)
        (sent,) = uploads.send(array)
        assert torch.equal(sent, torch.from_numpy(array))
    empty, one = uploads.send(np.empty(0, np.int64), np.ones(1, np.float32))
    assert empty.shape == (0,) and one.tolist() == [1.0]


@pytest.mark.parametrize("calls", [0, 1, 3])
def test_memory_that_was_let_go_is_not_written_before_its_last_use(
    calls: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An allocator gives it away at once, as all that it knows of runs in order."""
    lanes = Unlucky(True)
    uploads = PinnedUploads(lanes)
    for call in range(calls):
        uploads.send(*arrays(call))
    old, read = torch.full((SMALLEST,), 7, dtype=torch.uint8), list[Tensor]()
    lanes.compute(lambda: read.append(old.clone()))
    monkeypatch.setattr(lanes, "memory", lambda size: (torch.zeros(size, dtype=torch.uint8), old))
    (sent,) = uploads.send(np.arange(5))
    lanes.finish()
    assert bool((read[0] == 7).all())
    assert sent.tolist() == [0, 1, 2, 3, 4]


def test_on_the_host_nothing_is_copied() -> None:
    array = np.arange(5)
    (sent,) = HostUploads().send(array)
    array[0] = 7
    assert sent[0] == 7
