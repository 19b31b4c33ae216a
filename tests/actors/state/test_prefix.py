"""Where snapshots belong and where a sequence may begin, as numbers."""

import pytest

from expertmesh.actors.state.prefix import ladder, last_start, thin


@pytest.mark.parametrize(
    ("tokens", "start"),
    [(0, 0), (1, 0), (64, 0), (65, 64), (128, 64), (129, 128), (192, 128), (193, 192)],
)
def test_one_token_is_always_left_to_compute(tokens: int, start: int) -> None:
    assert last_start(tokens) == start


def test_ladder_has_a_rung_each_step_but_not_on_the_last_page() -> None:
    assert ladder(64 * 10 + 1, 128) == [128, 256, 384, 512, 640]
    assert ladder(64 * 10, 128) == [128, 256, 384, 512]
    assert ladder(100, 128) == []


@pytest.mark.parametrize("tip", [4096 * 8, 4096 * 100 + 64, 1 << 20])
def test_thinned_ladder_keeps_one_rung_per_octave(tip: int) -> None:
    kept: list[int] = []
    for rung in range(4096, tip + 1, 4096):  # as a long prompt leaves them, step by step
        kept = thin([*kept, rung], rung, 4096)
    assert len(kept) <= 2 + (tip // 4096).bit_length()
    # What an edit at distance d costs is about d: some rung lies within twice the distance.
    for distance in (4096, 3 * 4096, tip // 4, tip // 2):
        before = max((rung for rung in kept if rung <= tip - distance), default=0)
        assert tip - before <= 4 * distance + 2 * 4096
