"""Counts what a piece of tensor code launches and moves, by watching it run once."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


@dataclass(slots=True)
class Work:
    """launched: operators that touch data; views are free. moved: bytes of their operands and
    results, each counted as often as an operator reads or writes it, wherever it may be cached."""

    launched: int = 0
    moved: int = 0


class Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """`with watch: ...`, then `watch.work`."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.work = Work()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        # An operator made of others (vecdot: a product, then a sum) counts as those.
        with self:
            made = func.decompose(*args, **(kwargs or {}))
        if made is not NotImplemented:
            return made
        made = func(*args, **(kwargs or {}))
        if not _is_view(func):
            self.work.launched += 1
            touched = [*tree_leaves((args, kwargs or {})), *tree_leaves(made)]
            self.work.moved += sum(_bytes(one) for one in touched if isinstance(one, Tensor))
        return made


def _is_view(func: Any) -> bool:
    """An operator whose results all share an operand's memory without changing it."""
    returns = func._schema.returns
    return bool(returns) and all(
        one.alias_info is not None and not one.alias_info.is_write for one in returns
    )


def _bytes(tensor: Tensor) -> int:
    """Of the elements in memory: an expanded axis is one element."""
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    elements = 1
    for size, stride in steps:
        elements *= size if stride or size == 0 else 1
    return elements * tensor.element_size()


@torch.inference_mode()
def count(run: Any) -> Work:
    """What one call of `run` does."""
    watch = Watch()
    with watch:
        run()
    return watch.work
