"""Small arrays from the host to the device that computes, many in one copy, nobody waiting."""

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

ALIGN = 16
SMALLEST = 1 << 16
# Calls after which the tensors of one may be written over, at the earliest.
KEPT = 6
DTYPES = {
    np.dtype(np.int64): torch.int64,
    np.dtype(np.int32): torch.int32,
    np.dtype(np.float64): torch.float64,
    np.dtype(np.float32): torch.float32,
}


class Uploads(Protocol):
    def send(self, *arrays: np.ndarray) -> list[Tensor]:
        """The arrays as tensors on the device, same dtypes and shapes.

        They may be written over after KEPT more calls.
        """
        ...

    def keep(self, *arrays: np.ndarray) -> list[Tensor]:
        """The same in memory of their own."""
        ...


class HostUploads:
    """The device is the host: the tensors share the arrays' memory."""

    def send(self, *arrays: np.ndarray) -> list[Tensor]:
        return [torch.from_numpy(array) for array in arrays]

    keep = send


class Lanes(Protocol):
    """The stream that computes, and one beside it for copies."""

    def memory(self, size: int) -> tuple[Tensor, Tensor]:
        """uint8 [size] twice: on the host, page-locked, and on the device."""
        ...

    def mark(self) -> Any:
        """A point that computing passes once it has done all that was asked for so far."""
        ...

    def copy(self, target: Tensor, source: Tensor, after: Any) -> Any:
        """Copies beside the computing, not before mark `after`; what is asked of the computing
        stream from now on waits for it. Returns the mark of the copy's end."""
        ...

    def wait(self, mark: Any) -> None:
        """Blocks the host until `mark` has been passed."""
        ...


class PinnedUploads:
    """All arrays of a call travel as one copy out of page-locked memory on a side stream.

    Memory comes from a ring. A copy waits, on the device, until all that was asked for before the
    previous call is done; so a copy runs beside what has been asked for since, and whoever used
    what lay in its place is done. The host waits for the last copy from the same place of the
    ring, which has ended long ago.
    """

    def __init__(self, lanes: Lanes) -> None:
        self._lanes = lanes
        self._ring: list[_Slot | None] = [None] * (KEPT + 2)
        self._calls = 0
        self._before: Any = None

    def send(self, *arrays: np.ndarray) -> list[Tensor]:
        return _cut(self._sent(arrays), arrays)

    def keep(self, *arrays: np.ndarray) -> list[Tensor]:
        return _cut(self._sent(arrays).clone(), arrays)

    def _sent(self, arrays: Sequence[np.ndarray]) -> Tensor:
        size = sum(_aligned(array.nbytes) for array in arrays)
        slot, at = self._slot(size), 0
        host = slot.host.numpy()
        for array in arrays:
            host[at : at + array.nbytes] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
            at += _aligned(array.nbytes)
        before, self._before = self._before, self._lanes.mark()
        # New memory may be somebody's who has let go of it and is not done with it on the device.
        after = self._before if slot.copied is None else before
        slot.copied = self._lanes.copy(slot.device[:size], slot.host[:size], after)
        return slot.device[:size]

    def _slot(self, size: int) -> "_Slot":
        at = self._calls % len(self._ring)
        self._calls += 1
        slot = self._ring[at]
        if slot is not None:
            self._lanes.wait(slot.copied)
        if slot is None or slot.host.numel() < size:
            grown = SMALLEST
            while grown < size:
                grown *= 2
            # The old memory may still be read; the allocators keep it until then.
            slot = self._ring[at] = _Slot(*self._lanes.memory(grown))
        return slot


class _Slot:
    __slots__ = ("copied", "device", "host")

    def __init__(self, host: Tensor, device: Tensor) -> None:
        self.host, self.device, self.copied = host, device, None


class CudaLanes:
    """Never run where this was written: there is no GPU."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._side: Any = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def memory(self, size: int) -> tuple[Tensor, Tensor]:
        with torch.inference_mode(False):
            host = torch.empty(size, dtype=torch.uint8, pin_memory=True)
            return host, torch.empty(size, dtype=torch.uint8, device=self._device)

    def mark(self) -> Any:
        return torch.cuda.current_stream(self._device).record_event()

    def copy(self, target: Tensor, source: Tensor, after: Any) -> Any:
        computing = torch.cuda.current_stream(self._device)
        self._side.wait_event(after)
        with torch.cuda.stream(self._side):
            target.copy_(source, non_blocking=True)
            done = self._side.record_event()
        computing.wait_event(done)
        return done

    def wait(self, mark: Any) -> None:
        mark.synchronize()


def uploads_for(device: torch.device) -> Uploads:
    return PinnedUploads(CudaLanes(device)) if device.type == "cuda" else HostUploads()


def _cut(whole: Tensor, arrays: Sequence[np.ndarray]) -> list[Tensor]:
    parts, at = [], 0
    for array in arrays:
        part = whole[at : at + array.nbytes].view(DTYPES[array.dtype])
        parts.append(part.view(array.shape))
        at += _aligned(array.nbytes)
    return parts


def _aligned(size: int) -> int:
    return -(-size // ALIGN) * ALIGN
