"""Meta tensors in the place of a GPU's: they have shapes and no data, so a host cannot read them.

(FakeTensorMode with fake "cuda" tensors needs a CUDA build: indexing and moving go through a device
guard that CPU builds do not have.) `.item()`, `.tolist()`, `bool()`, `.cpu()` and `.nonzero()` fail
on meta tensors by themselves; `one_device` adds what they let pass.
"""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from expertmesh.actors.model.upload import DTYPES
from expertmesh.kernels.launch import Launch, recording

META = torch.device("meta")
MOVES = ("aten::to.", "aten::_to_copy")


class _OneDevice(TorchDispatchMode):
    """operators: how many ran, views left out."""

    def __init__(self, moving: bool) -> None:
        super().__init__()
        self._moving = moving
        self.operators = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        inside = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        out = func(*args, **kwargs)
        made = [leaf for leaf in tree_leaves(out) if isinstance(leaf, Tensor)]
        # A number as a 0-d tensor of the host may meet tensors of a device.
        types_of = {each.device.type for each in inside if each.dim() or each.device == META}
        types_of |= {each.device.type for each in made if inside}
        if len(types_of) > 1 and not (self._moving and func.name().startswith(MOVES)):
            shapes = [(each.device.type, tuple(each.shape)) for each in inside]
            raise AssertionError(f"{func}: tensors of the host and of the device, {shapes}")
        self.operators += not all(each._is_view() for each in made)
        return out


class _NoLiterals(TorchFunctionMode):
    """What becomes a tensor on the device out of numbers of the host, unseen by a dispatch mode."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in (torch.tensor, torch.as_tensor) and kwargs.get("device") not in (None, "cpu"):
            raise AssertionError(f"{func.__name__}: numbers of the host for the device")
        if func in (Tensor.__getitem__, Tensor.__setitem__) and args[0].device == META:
            index = args[1] if isinstance(args[1], tuple) else (args[1],)
            if any(isinstance(part, list) for part in index):
                raise AssertionError("a list of the host as an index on the device")
        return func(*args, **kwargs)


@contextmanager
def one_device(moving: bool = False) -> Iterator[tuple[_OneDevice, list[Launch]]]:
    """Inside, an operator on tensors of host and device, or a copy from one to the other, is an
    AssertionError; kernel launches are listed and not made. moving: host tensors may be moved to
    the device, as prompts do with what is planned for them."""
    mode = _OneDevice(moving)
    literals = nullcontext() if moving else _NoLiterals()
    with recording() as launches, literals, mode:
        yield mode, launches


class MetaUploads:
    """Uploads (actors/model/upload.py) to the device that is none. sent: bytes, by call."""

    def __init__(self) -> None:
        self.sent: list[int] = []

    def send(self, *arrays: np.ndarray) -> list[Tensor]:
        self.sent.append(sum(array.nbytes for array in arrays))
        return [torch.empty(a.shape, dtype=DTYPES[a.dtype], device=META) for a in arrays]

    keep = send
