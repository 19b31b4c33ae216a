"""Every buffer that an operator asks for uninitialised arrives full of NaN, of integers full of the
largest: no id, slot or place, and of bytes FP8's NaN.

Fixtures end with their module: a package of this layout has no __init__.py, so pytest would keep
"package" ones, and with them the inference mode, for the rest of the session.
"""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from tests.support import triton_bf16, triton_speed

triton_bf16.install()
triton_speed.install()


def poison(dtype: torch.dtype) -> float:
    if dtype.is_floating_point:
        return float("nan")
    return 1 if dtype == torch.bool else torch.iinfo(dtype).max


@pytest.fixture(autouse=True, scope="module")
def poisoned_empty() -> Iterator[None]:
    def poisoned(make: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def empty(*args: Any, **kwargs: Any) -> torch.Tensor:
            tensor = make(*args, **kwargs)
            return tensor.fill_(poison(tensor.dtype))

        return empty

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "empty", poisoned(torch.empty))
        patch.setattr(torch, "empty_like", poisoned(torch.empty_like))
        patch.setattr(torch.Tensor, "new_empty", poisoned(torch.Tensor.new_empty))
        yield


@pytest.fixture(autouse=True, scope="module")
def inference() -> Iterator[None]:
    """As in the engine; also keeps cached constants usable in both modes."""
    with torch.inference_mode():
        yield
