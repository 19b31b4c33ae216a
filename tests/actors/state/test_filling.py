"""State that arrives while the first layers compute: in order, in whole, or with an error."""

import threading

import pytest
import torch
from torch import Tensor

from expertmesh.actors.model.config import parse_config
from expertmesh.actors.state.filling import LayerFill, take_out
from expertmesh.actors.state.item import Header, Kind, StateLayout, Tier
from expertmesh.actors.state.model_state import ModelState
from tests.support.checkpoints import config_dict

HEADER = Header(b"k" * 32, Kind.PAGE, b"p" * 32, 64, tuple(range(64)), "prefill", b"l")


class Slow:
    """A loaded item of ones that hands out layer `gate` only when it is told to."""

    exact, nbytes, raw_bytes = True, 0, 0
    tier: Tier = "host"
    header = HEADER

    def __init__(self, gate: int = -1, broken: bool = False) -> None:
        self.gate, self.broken, self.open = gate, broken, threading.Event()

    def layer(self, part: int, index: int, out: Tensor) -> None:
        if self.broken:
            raise OSError("gone")
        if index == self.gate:
            assert self.open.wait(10)
        out.fill_(part + 1)


@pytest.fixture
def state() -> ModelState:
    """KDA, KDA, KDA, MLA, KDA, KDA, KDA, MLA; poisoned."""
    state = ModelState(parse_config(config_dict(num_hidden_layers=8)), 4, 2, torch.float32)
    for tensor in state.tensors():
        tensor.fill_(torch.nan)
    return state


def test_a_layer_is_there_before_those_behind_it(state: ModelState) -> None:
    late = Slow(gate=1)
    fill = LayerFill(state, [(2, late), (0, late)], 1, Slow())
    fill.wait(3)  # the first MLA layer and the KDA layers before it
    paged = state.paged()
    assert bool((paged[0, [0, 2]] == 1).all()) and bool(paged[0, [1, 3]].isnan().all())
    assert bool((state.kda[:3, 1] == 1).all()) and bool((state.conv[:3, 1] == 2).all())
    assert bool(paged[1].isnan().all()) and bool(state.kda[:, 0].isnan().all())
    late.open.set()
    fill.wait(7)
    assert bool((paged[1, [0, 2]] == 1).all()) and bool((state.kda[:, 1] == 1).all())


def test_what_cannot_be_copied_is_an_error_and_no_wait(state: ModelState) -> None:
    fill = LayerFill(state, [], 0, Slow(broken=True))
    with pytest.raises(RuntimeError, match="gone"):
        fill.wait(7)


def test_what_is_taken_out_is_a_copy(state: ModelState) -> None:
    state.latents.zero_()
    item = take_out(HEADER, (state.paged()[:, 1],))
    state.latents.fill_(5)
    assert not item.parts[0].any() and item.parts[0].is_contiguous() and item.ready is None
    layout = StateLayout.of(state.config, torch.float32)
    assert [(tuple(p.shape), p.dtype) for p in item.parts] == layout.parts(Kind.PAGE)
