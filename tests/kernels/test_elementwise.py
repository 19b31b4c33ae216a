import pytest
import torch

from expertmesh.kernels import elementwise
from tests.kernels.checks import assert_close, assert_rows_alone, randn

FUNCTIONS = {
    "sigmoid": (elementwise.sigmoid, torch.sigmoid),
    "silu": (elementwise.silu, torch.nn.functional.silu),
    "softplus": (elementwise.softplus, torch.nn.functional.softplus),
}


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("width", [1, 4, 7, 16, 31, 32, 48, 96])
def test_rows_do_not_depend_on_their_place(name: str, width: int) -> None:
    x = randn(40, width) * 4
    assert_rows_alone(lambda rows: FUNCTIONS[name][0](x[rows]))
    assert_close(FUNCTIONS[name][0](x), FUNCTIONS[name][1](x), 1e-6)


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("width", [5, 32])
def test_extreme_values(name: str, width: int) -> None:
    x = torch.tensor([-1e4, -200.0, -88.0, 0.0, 88.0, 200.0, 1e4]).repeat(width).view(7, width)
    assert_close(FUNCTIONS[name][0](x), FUNCTIONS[name][1](x.double()).float(), 1e-6)


def test_constants_are_shared_and_usable_outside_inference_mode() -> None:
    with torch.inference_mode():
        one = elementwise.constant(1.0)
    assert elementwise.constant(1.0) is one and not one.is_inference()
