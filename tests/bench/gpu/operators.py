"""The operators under test: their implementations by backend, their exact formulas."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from expertmesh.kernels.cases import Case, all_cases
from expertmesh.kernels.registry import OPERATORS
from tests.bench.gpu import attention_formulas, choice_formulas, formulas
from tests.bench.gpu.claims import Claim, floating

Args = tuple[Any, ...]
Formula = Callable[[Args, Any, Args], list[Claim]]

# Arguments that are updated in place, by position.
UPDATED = {"kda_decode": (7, 8), "kda_prefill": (7, 8)}


def implementation(operator: str, backend: str) -> Callable[..., Any]:
    module = {"triton": "triton_ops", "torch": "torch_ops"}[backend]
    found = import_module(f"expertmesh.kernels.{OPERATORS[operator].home}.{module}")
    function: Callable[..., Any] = getattr(found, operator)
    return function


def cases() -> dict[str, Case]:
    """Those of operators that have a Triton kernel, by name."""
    return {case.name: case for case in all_cases() if not OPERATORS[case.operator].without_triton}


def formula(operator: str) -> Formula | None:
    for module in (formulas, attention_formulas, choice_formulas):
        found = getattr(module, operator, None)
        if found is not None:
            return found  # type: ignore[no-any-return]
    return None


def kept(operator: str, args: Args) -> Args:
    """The arguments with copies of what the operator will change."""
    return tuple(
        x.clone() if place in UPDATED.get(operator, ()) else x for place, x in enumerate(args)
    )


def claims(operator: str, before: Args, result: Any, after: Args) -> list[Claim]:
    """Against the operator's formula; of an operator without one, against its torch twin."""
    exact = formula(operator)
    return exact(before, result, after) if exact else _twin_claims(operator, before, result)


def _twin_claims(operator: str, before: Args, result: Any) -> list[Claim]:
    expected = implementation(operator, "torch")(*before)
    pairs = zip(tensors(result), tensors(expected), strict=True)
    return [
        floating(f"output {i} of the torch twin", one, other.double(), l2=5e-3)
        if one.is_floating_point()
        else Claim(f"output {i} of the torch twin", one, other.double())
        for i, (one, other) in enumerate(pairs)
    ]


def tensors(value: Any) -> list[Tensor]:
    """Those in a value of tuples, in order."""
    if isinstance(value, Tensor):
        return [value]
    return [x for part in value for x in tensors(part)] if isinstance(value, tuple) else []


def same_bits(one: Tensor, other: Tensor) -> bool:
    """NaN equals itself."""
    widths = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    left, right = (x.contiguous().view(widths[x.element_size()]) for x in (one, other))
    return torch.equal(left, right)


@contextmanager
def poisoned() -> Iterator[None]:
    """Memory that is asked for uninitialised arrives full of NaN, or of ones that mean nothing."""
    plain = torch.empty, torch.empty_like, torch.Tensor.new_empty

    def filled(make: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def empty(*args: Any, **kwargs: Any) -> Tensor:
            tensor = make(*args, **kwargs)
            return tensor.fill_(torch.nan if tensor.is_floating_point() else 1)

        return empty

    torch.empty, torch.empty_like, torch.Tensor.new_empty = map(filled, plain)  # type: ignore[assignment,method-assign]
    try:
        yield
    finally:
        torch.empty, torch.empty_like, torch.Tensor.new_empty = plain  # type: ignore[method-assign]
