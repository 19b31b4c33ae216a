"""10,000 steps over 4 to 8 ranks in bad weather: nobody hangs, nobody disagrees. See storm.py."""

import pytest

from tests.actors.exchange.storm import Storm

STORMS = [(4, 5000), (6, 2500), (8, 1500)]
STORMS_OF = [("direct", *storm) for storm in STORMS] + [("exact", 6, 500), ("padded", 6, 500)]


@pytest.mark.parametrize(("layout", "ranks", "steps"), STORMS_OF)
def test_nobody_hangs_and_nobody_disagrees(layout: str, ranks: int, steps: int) -> None:
    report = Storm(steps, ranks, seed=ranks, layout=layout).run()
    assert report["failures"] == []
    assert all(report[what] for what in ("worked", "joined", "resumed", "flips", "epochs"))
