"""As many copies of an operator's inputs as it takes to find none of them in the cache."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from expertmesh.kernels.cases import Make
from tests.bench.gpu.inputs import DeviceMake

Args = tuple[Any, ...]
MOST_COPIES, MOST_BYTES = 128, 24 << 30


def copies_of(
    arguments: Callable[[Make], Args], moved_bytes: int, device: torch.device, cache_bytes: int
) -> list[Args]:
    """Two at least, and together at least three times the cache: by what a call moves, of which the
    inputs may be a part."""
    first = arguments(DeviceMake(device, 0))
    wanted = -(-3 * cache_bytes // max(1, moved_bytes))
    affordable = max(1, MOST_BYTES // max(1, held_bytes(first)))
    count = min(max(2, wanted), MOST_COPIES, affordable)
    return [first, *(arguments(DeviceMake(device, seed)) for seed in range(1, count))]


def held_bytes(args: Args) -> int:
    """Memory that the tensors among the arguments keep, each storage once."""
    storages = {
        x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in _tensors(args)
    }
    return sum(storages.values())


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, tuple | list):
        for part in value:
            yield from _tensors(part)
    elif hasattr(value, "table"):
        yield from value.table().tensors
