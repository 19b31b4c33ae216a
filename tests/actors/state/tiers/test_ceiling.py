"""The hit rate that no cache can exceed."""

import random

import pytest

from expertmesh.actors.state.tiers.ceiling import Ceiling


def keys(seed: int, count: int) -> list[bytes]:
    return [random.Random(f"{seed} {at}").randbytes(32) for at in range(count)]


@pytest.mark.parametrize("count", [0, 1, 2, 64, 1000, 20_000])
def test_counts_different_keys_from_the_first_on(count: int) -> None:
    ceiling = Ceiling()
    ceiling.add(keys(1, count))
    # Four standard errors of 2 ** 14 registers.
    assert ceiling.distinct == pytest.approx(count, rel=4 * 1.04 / 128, abs=0.01)


def test_a_small_sketch_saturates_gracefully() -> None:
    ceiling = Ceiling(precision=4)
    ceiling.add(keys(2, 5000))
    assert ceiling.distinct == pytest.approx(5000, rel=4 * 1.04 / 4)


def test_full_registers_are_an_estimate_and_no_error() -> None:
    ceiling = Ceiling(precision=4)
    ceiling.add([(at << 60).to_bytes(8, "little") + bytes(24) for at in range(16)])
    assert ceiling.distinct == float("inf")
    assert ceiling.ratio == 0.0


def test_ratio_is_the_share_of_repeats() -> None:
    ceiling = Ceiling()
    assert ceiling.ratio == 0.0
    seen = keys(3, 1000)
    ceiling.add(seen)
    assert ceiling.ratio == pytest.approx(0.0, abs=0.04)
    for _ in range(3):
        ceiling.add(seen)
    assert ceiling.lookups == 4000
    assert ceiling.ratio == pytest.approx(0.75, abs=0.02)


def test_refuses_precisions_that_make_no_sense() -> None:
    for precision in (3, 19):
        with pytest.raises(ValueError, match="precision"):
            Ceiling(precision)
