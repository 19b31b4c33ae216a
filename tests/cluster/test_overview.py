"""The routing at a glance: relative to an even share, and small at any size."""

import msgspec
import numpy as np
import pytest

from expertmesh.cluster.ledger.overview import COLUMNS, LayerOverview, layer_overviews
from expertmesh.cluster.placement import Placement, contiguous_placement


def overviews(hits_LE: np.ndarray, placement: Placement | None) -> list[LayerOverview]:
    layers = tuple(range(len(hits_LE)))
    return layer_overviews(layers, hits_LE, placement, np.zeros(hits_LE.shape, bool))


def test_loads_are_relative_to_an_even_share() -> None:
    placement = Placement({0: ((0,), (1,))})
    (layer,) = overviews(np.array([[30.0, 10.0]]), placement)
    assert layer.ranks == [1.5, 0.5] and layer.spread == [1.5, 0.5]
    assert layer.imbalance == 1.5 and layer.entropy is not None and layer.entropy < 1


def test_a_layer_without_load_has_no_numbers() -> None:
    placement = contiguous_placement((0, 1), 4, 2)
    idle, loaded = overviews(np.array([[0.0] * 4, [1.0] * 4]), placement)
    assert (idle.ranks, idle.spread, idle.imbalance, idle.entropy) == ([], [], None, None)
    assert loaded.ranks == [1.0, 1.0] and loaded.imbalance == 1.0


def test_without_an_expert_tier_there_are_hits_and_no_ranks() -> None:
    (layer,) = overviews(np.array([[1.0, 3.0]]), None)
    assert layer.ranks == [] and layer.imbalance is None and layer.spread == [1.5, 0.5]


@pytest.mark.parametrize("experts", [1, 16, 63, 64, 65, 100, 896])
def test_columns_keep_order_and_sum(experts: int) -> None:
    hits_LE = np.random.default_rng(experts).gamma(1.0, size=(3, experts))
    for row, layer in zip(hits_LE, overviews(hits_LE, None), strict=True):
        assert len(layer.spread) == min(experts, COLUMNS)
        assert layer.spread == sorted(layer.spread, reverse=True)
        starts = np.arange(len(layer.spread)) * experts // len(layer.spread)
        widths = np.diff([*starts, experts])
        assert (widths * layer.spread).sum() == pytest.approx(experts, rel=0.02)
        assert layer.spread[0] <= row.max() / row.mean() + 0.01


def test_dead_experts_are_counted_and_all_is_json() -> None:
    dead_LE = np.array([[True, False, True, False]])
    placement = contiguous_placement((7,), 4, 2)
    (layer,) = layer_overviews((7,), np.array([[0.0, 2.0, 0.0, 2.0]]), placement, dead_LE)
    assert layer.layer == 7 and layer.dead == 2
    assert msgspec.json.decode(msgspec.json.encode(layer), type=LayerOverview) == layer
