"""State that arrives while the first layers compute: in order, in whole, or with an error."""

import threading
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from expertmesh.actors.model.config import parse_config
from expertmesh.actors.state.codec.pack import pack
from expertmesh.actors.state.filling import LayerFill, take_out
from expertmesh.actors.state.item import Header, Item, Kind, StateLayout, Tier
from expertmesh.actors.state.model_state import ModelState
from expertmesh.actors.state.store import Loaded, fill_layer
from expertmesh.actors.state.tiers.bandwidth import Bandwidth
from expertmesh.actors.state.tiers.content import Stored, Unpacked
from expertmesh.actors.state.tiers.fetch import LoadedItem
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


class Measured(Bandwidth):
    """Remembers what it was told."""

    def __init__(self) -> None:
        super().__init__(1e9, 1e-5)
        self.told: list[int] = []

    def measured(self, nbytes: int, seconds: float) -> None:
        assert 0 <= seconds < 10
        self.told.append(nbytes)


@pytest.mark.parametrize("strided", [False, True])
def test_items_of_any_origin_fill_a_layer_together(strided: bool) -> None:
    """Each in its row, and the tiers' speed is measured by the call instead of by the page."""
    speed = Measured()
    pages = torch.randn(12, 2, 64, 20, generator=torch.Generator().manual_seed(5))
    loaded: list[Loaded] = []
    for at, page in enumerate(pages):
        item = Item(replace(HEADER, position=64 * at), (page,))
        codec = "raw" if at % 2 else "lossless"
        content = Unpacked(item) if at % 3 == 1 else Stored(pack(item, codec))
        loaded.append(LoadedItem(item.header, content, "host", speed))
    loaded[5] = Slow()
    pages[5] = 1.0
    out = torch.full((14, 64, 40 if strided else 20), torch.nan)[:, :, :: 2 if strided else 1]
    rows = [3, 1, 4, 13, 5, 9, 2, 6, 8, 7, 10, 0]
    fill_layer(loaded, 0, 1, out, rows)
    assert torch.equal(out[rows], pages[:, 1]) and bool(out[[11, 12]].isnan().all())
    assert speed.told == 2 * [64 * 20 * 4]  # five items before the stranger, six behind it
    with pytest.raises(OSError, match="gone"):
        fill_layer([*loaded, Slow(broken=True)], 0, 1, out, [*rows, 11])
    with pytest.raises(ValueError, match="into"):
        fill_layer(loaded, 0, 1, out[:, :63], rows)


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
