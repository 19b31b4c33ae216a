"""A stand-in for CUDA graphs on a CPU: what was recorded runs again on the same memory.

Like a graph it keeps tensors' addresses and no Python: while it records it notes every operator of
torch and every kernel launch with its arguments; a replay repeats them and writes each result where
the first one lay. Whatever was not copied into a static buffer before keeps its old value, and what
Python decided while recording is not decided again.
"""

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

Result = TypeVar("Result")
Entry = Callable[[], None]


class Tape(TorchDispatchMode):
    """A Recorder (actors/model/graphs.py)."""

    def __init__(self) -> None:
        super().__init__()
        self._entries: list[Entry] | None = None
        self.recorded: list[int] = []  # operators, by graph, in the order of recording
        self.warmed = self.replays = 0

    def warm(self, run: Callable[[], Any]) -> None:
        run()
        self.warmed += 1

    def record(self, micro: int, run: Callable[[], Result]) -> tuple[Entry, Result]:
        assert self._entries is None, "a graph inside a graph"
        entries = self._entries = []
        try:
            with self:
                result = run()
        finally:
            self._entries = None
        self.recorded.append(len(entries))

        def replay() -> None:
            self.replays += 1
            for entry in entries:
                entry()

        return replay, result

    def opaque(self, kernel: Callable[..., Tensor]) -> Callable[..., Tensor]:
        """`kernel` as one recorded operator, for one that asks the host in its inside."""

        def call(*args: Any, **kwargs: Any) -> Tensor:
            entries, self._entries = self._entries, None
            try:
                out = kernel(*args, **kwargs)
            finally:
                self._entries = entries
            if entries is not None:
                entries.append(lambda: _write(out, kernel(*args, **kwargs)))
            return out

        return call

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is torch.ops.aten._local_scalar_dense.default and self._entries is not None:
            raise RuntimeError("the host waits for the device inside a graph")
        out = func(*args, **kwargs)
        if self._entries is not None:
            self._entries.append(lambda: _write(out, func(*args, **kwargs)))
        return out


def _write(kept: Any, made: Any) -> None:
    """Into the memory of the first result; views and operators in place are there already."""
    for target, source in zip(tree_leaves(kept), tree_leaves(made), strict=True):
        if isinstance(target, Tensor) and target.data_ptr() != source.data_ptr():
            target.copy_(source)
