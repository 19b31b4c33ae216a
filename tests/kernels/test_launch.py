from types import SimpleNamespace
from typing import Any

import pytest
import torch

from expertmesh.kernels import launch as launching
from expertmesh.kernels.launch import (
    dense_rows,
    launch,
    power_of_two,
    recording,
    runs_on,
    target,
    warps_of,
)


class Kernel:
    """Takes what a compiled kernel takes."""

    __name__ = "stand_in_kernel"

    def __init__(self) -> None:
        self.made: list[Any] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return lambda *arguments, **options: self.made.append((grid, arguments, options))


def test_a_launch_is_made_or_recorded() -> None:
    kernel, x = Kernel(), torch.zeros(3)
    launch(kernel, [2, 5], x, 7, None, num_warps=8, BLOCK=16)
    launch(kernel, (2, 0), x)  # of no program: none
    options = {"num_warps": 8, "num_stages": 2, "BLOCK": 16}
    assert kernel.made == [((2, 5), (x, 7, None), options)]
    with recording() as launches:
        launch(kernel, (4,), x.to("meta"), BLOCK=1)
    (one,) = launches
    assert (one.name, one.grid, one.constants) == ("stand_in_kernel", (4,), {"BLOCK": 1})
    assert len(kernel.made) == 1


def test_a_tensor_that_no_kernel_reaches_is_refused() -> None:
    """Its address would be one of another memory."""
    with pytest.raises(ValueError, match="stand_in_kernel: Triton runs no kernel on meta"):
        launch(Kernel(), (1,), torch.zeros(1), torch.zeros(1, device="meta"))


def test_the_device_that_runs_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    assert runs_on("cpu") and not runs_on("cuda")
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    assert runs_on("cuda") and not runs_on("cpu")


def test_launchers_choose_for_the_gpu_here_or_the_one_recorded_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert target() == ""  # the interpreter
    with recording("gfx942"):
        with recording():
            assert target() == "sm_90"
        assert target() == "gfx942"
    assert target() == ""
    here = launching._target_here.__wrapped__
    facts = SimpleNamespace(major=10, minor=3, gcnArchName="gfx942:sramecc+:xnack-")
    monkeypatch.setattr(launching, "interpreted", lambda: False)
    assert here() == ""  # no GPU
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: facts)
    assert here() == "sm_103"
    monkeypatch.setattr(torch.version, "hip", "6.4")
    assert here() == "gfx942"


def test_shapes_of_blocks() -> None:
    assert [power_of_two(n) for n in (0, 1, 2, 3, 8, 9, 7168)] == [1, 1, 2, 4, 8, 16, 8192]
    assert [warps_of(n) for n in (1, 2048, 4096, 8192, 1 << 20)] == [4, 4, 8, 16, 16]


def test_rows_are_copied_only_where_their_elements_lie_apart() -> None:
    wide = torch.arange(24.0).view(4, 6)
    for near in (wide, wide[:, 1:3], wide[::2], wide[:, :1], wide[:0]):
        assert dense_rows(near) is near
    apart = dense_rows(wide.t())
    assert apart.stride(-1) == 1 and torch.equal(apart, wide.t())
