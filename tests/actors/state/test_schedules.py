"""Random schedules over cached state: no answer shows a bit of what happened around it."""

from pathlib import Path

import msgspec
import pytest

from tests.support.state_below import Memory, Tiers
from tests.support.state_model import small_model
from tests.support.state_oracle import Oracle
from tests.support.state_schedules import Asked, Mismatch, World

# A bench runs a hundred thousand: python -m tests.bench state_schedules.
SCHEDULES = 12


@pytest.fixture(scope="module")
def oracle() -> Oracle:
    return Oracle(small_model())


@pytest.mark.parametrize("seed", range(3))
def test_no_schedule_changes_a_bit(seed: int, oracle: Oracle, tmp_path: Path) -> None:
    world = World(seed, small_model(), oracle, Memory(seed, tmp_path))
    for number in range(SCHEDULES):
        world.schedule(number)
    counts = world.counts
    assert counts.mismatches == 0 and counts.rows > SCHEDULES
    assert counts.cached_tokens, "nothing was found again"


def test_nor_with_real_tiers(oracle: Oracle, tmp_path: Path) -> None:
    world = World(50, small_model(), oracle, Tiers(0, tmp_path))
    try:
        for number in range(SCHEDULES):
            world.schedule(number)
    finally:
        world.close()
    assert world.counts.cached_tokens


def test_nor_with_routed_experts(tmp_path: Path) -> None:
    runner = small_model(experts=True)
    world = World(100, runner, Oracle(runner), Memory(0, tmp_path))
    for number in range(10):
        world.schedule(number)
    assert world.counts.cached_tokens


def test_an_heir_may_begin_within_its_answer_and_others_only_on_the_grid(
    oracle: Oracle, tmp_path: Path
) -> None:
    world = World(0, small_model(), oracle, Memory(0, tmp_path))
    made = msgspec.structs.replace(world._request(), prompt_ids=[1] * 191, session="", kv_mode="")
    heir = Asked(msgspec.structs.replace(made, resume_ids=[2] * 3), 0, known=[2] * 3, cached=191)
    (path,) = world._paths(heir)
    assert [piece.tokens for piece in path] == [(1,) * 191]
    for strange in (Asked(made, 0, cached=191), Asked(made, 0, known=[2] * 3, cached=190)):
        with pytest.raises(Mismatch, match="nobody's state"):
            world._paths(strange)
