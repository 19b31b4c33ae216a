"""Comparisons shared by the operator tests."""

from collections.abc import Callable

import torch
from torch import Tensor

COMPANIONS = (1, 2, 3, 4, 5, 7, 8, 13, 31, 40)  # batch sizes a row is computed in


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def assert_close(actual: Tensor, expected: Tensor, tolerance: float = 1e-5) -> None:
    """Equal shape and dtype, no NaN, and within `tolerance` of max(1, |expected|)."""
    assert actual.shape == expected.shape and actual.dtype == expected.dtype
    error = (actual.double() - expected.double()).abs() / expected.double().abs().clamp(min=1.0)
    assert not error.isnan().any(), "NaN"
    worst = float(error.max()) if error.numel() else 0.0
    assert worst <= tolerance, f"error {worst:.2e} > {tolerance:.0e}"


def assert_rows_alone(compute: Callable[[Tensor], Tensor], rows: int = 40) -> None:
    """`compute(row numbers)` gives each row the same bits whatever the other rows are."""
    whole = compute(torch.arange(rows))
    assert not whole.isnan().any()
    generator = torch.Generator().manual_seed(rows)
    for count in COMPANIONS:
        for _ in range(6):
            chosen = torch.randperm(rows, generator=generator)[:count]
            got = compute(chosen)
            for place, row in enumerate(chosen.tolist()):
                assert torch.equal(got[place], whole[row]), f"row {row} among {count}"


def random_settings(rows: int, vocabulary: int, seed: int) -> tuple[Tensor, ...]:
    """temperature, top_k, top_p, min_p and uniform of `sample`, each [rows]; some switched off."""
    generator = torch.Generator().manual_seed(seed)

    def rand() -> Tensor:
        return torch.rand(rows, generator=generator)

    return (
        (rand() * 2 - 0.3).clamp(min=0),
        torch.randint(-1, vocabulary + 2, (rows,), generator=generator),
        rand() * 1.4 + 0.01,
        (rand() - 0.5).clamp(min=0),
        torch.rand(rows, generator=generator, dtype=torch.float64),
    )
