import numpy as np
import pytest

from expertmesh.cluster.balancing import table
from expertmesh.cluster.balancing.planner import balance
from expertmesh.cluster.balancing.table import FREE, changed_rows, to_table
from expertmesh.cluster.placement import Placement, contiguous_placement

LAYERS = [((0, 1), (2,)), ((2, 0), (1, 0))]


def test_free_slots_come_last_and_actors_without_a_list_are_empty() -> None:
    assert to_table([((0, 1), (2,))], 3, 2).tolist() == [[[0, 1], [2, FREE], [FREE, FREE]]]


def test_a_table_that_was_changed_does_not_change_the_next() -> None:
    first = to_table(LAYERS, 2, 2)
    before = first.copy()
    first[:] = 7
    second = to_table(LAYERS, 2, 2)
    second[:] = 8
    assert (to_table(LAYERS, 2, 2) == before).all()
    assert to_table(LAYERS, 2, 3).shape == (2, 2, 3)


def test_only_layers_that_change_are_written_anew() -> None:
    old = to_table(LAYERS, 2, 2)
    new = old.astype(np.int32)
    new[1, 0] = 1, FREE
    rows = changed_rows(LAYERS, old, new)
    assert rows == [LAYERS[0], ((1,), (1, 0))]
    assert rows[0] is LAYERS[0]
    assert (to_table(rows, 2, 2) == new).all()


def test_plans_are_the_same_whatever_was_planned_before(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(0)
    placement = contiguous_placement((0, 1, 2), 40, 4)
    for _ in range(4):
        loads = rng.lognormal(0, 1, (3, 40))
        plan = balance(loads, placement, slots=12)
        with monkeypatch.context() as patch:
            patch.setattr(table, "_remembered", {})
            afresh = {layer: tuple(map(tuple, rows)) for layer, rows in placement.held.items()}
            again = balance(loads, Placement(afresh), slots=12)
        assert again.placement == plan.placement
        placement = plan.placement


def test_no_more_is_remembered_than_a_few_placements() -> None:
    for nth in range(3 * table.REMEMBERED):
        to_table([((nth,), (nth + 1,))], 2, 1)
    assert len(table._remembered) <= table.REMEMBERED + 1
