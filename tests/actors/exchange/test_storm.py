"""10,000 steps over 4 to 8 ranks in bad weather: nobody hangs, nobody disagrees. See storm.py."""

import pytest

from tests.actors.exchange.storm import Storm


@pytest.mark.parametrize(
    ("layout", "ranks", "steps"),
    [("direct", 4, 3000), ("direct", 6, 3000), ("direct", 8, 3000), ("exact", 6, 500), ("padded", 6, 500)],
)  # fmt: skip
def test_nobody_hangs_and_nobody_disagrees(layout: str, ranks: int, steps: int) -> None:
    report = Storm(steps, ranks, seed=ranks, layout=layout).run()
    assert report["failures"] == []
    assert all(report[what] for what in ("worked", "joined", "resumed", "flips", "epochs"))
