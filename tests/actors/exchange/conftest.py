import pytest
import torch
from torch import Tensor


@pytest.fixture
def poison(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory that nobody wrote is NaN: every byte 0xFF."""
    empty = torch.empty

    def poisoned(*args: object, **kwargs: object) -> Tensor:
        made = empty(*args, **kwargs)
        if made.dtype == torch.uint8:
            return made.fill_(255)
        return made.fill_(float("nan")) if made.is_floating_point() else made

    monkeypatch.setattr(torch, "empty", poisoned)
