"""Linear without bias: y = x Wᵀ (k3-model.md section 2, "Linear(x; W)")."""

from collections.abc import Callable

from torch import Tensor


def pack_linear(weight_NK: Tensor) -> Callable[[Tensor], Tensor]:
    """Returns x_TK -> [T, N]."""

    def apply(x_TK: Tensor) -> Tensor:
        return (x_TK.unsqueeze(1).float() * weight_NK.float()).sum(-1).to(x_TK.dtype)

    return apply
