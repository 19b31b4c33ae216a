"""How often names were seen, in little memory."""

import random

import pytest

from expertmesh.actors.state.item import Kind, Name
from expertmesh.actors.state.tiers.frequency import FrequencySketch


def name(seed: int, kind: Kind = Kind.PAGE) -> Name:
    return Name(random.Random(seed).randbytes(32), kind)


def test_counts_up_to_a_limit() -> None:
    sketch = FrequencySketch(64)
    assert sketch.count(name(1)) == 0
    assert [sketch.add(name(1)) for _ in range(20)] == [*range(1, 16), *[15] * 5]
    assert sketch.count(name(1)) == 15


def test_never_counts_too_low_and_seldom_too_high() -> None:
    sketch = FrequencySketch(4096)
    times = {name(seed): 1 + seed % 3 for seed in range(1000)}
    for one, count in times.items():
        for _ in range(count):
            sketch.add(one)
    assert all(sketch.count(one) >= count for one, count in times.items())
    assert sum(sketch.count(one) > count for one, count in times.items()) < 50
    assert sum(sketch.count(name(seed)) > 0 for seed in range(1000, 2000)) < 50


def test_a_page_and_the_snapshot_of_its_key_are_two() -> None:
    sketch = FrequencySketch(1 << 16)
    sketch.add(name(1))
    assert sketch.count(name(1, Kind.SNAPSHOT)) == 0


def test_old_counts_fade() -> None:
    sketch = FrequencySketch(64)
    for _ in range(10):
        sketch.add(name(1))
    for seed in range(2, 8 * 64):
        sketch.add(name(seed))
    assert sketch.count(name(1)) <= 8


def test_refuses_widths_that_are_no_power_of_two() -> None:
    for width in (0, 3):
        with pytest.raises(ValueError, match="power of two"):
            FrequencySketch(width)
