import numpy as np

from expertmesh.cluster.balancing.islands import ALONE, RISK_OF_SIZE, island_risks


def risks(copies: list[tuple[int, int]], load_G: list[float], shared_A: list[float]) -> list[float]:
    """copies: (expert, actor)."""
    group_C, actor_C = np.array(copies, np.int64).reshape(-1, 2).T
    return island_risks(group_C, actor_C, np.array(load_G), np.array(shared_A)).tolist()


def test_actors_that_share_only_with_each_other_are_an_island() -> None:
    chain = [(nth, actor) for nth in range(11) for actor in (nth + 2, nth + 3)]
    copies = [(nth + 1, actor) for nth, actor in chain] + [(0, 0), (0, 1)]
    found = risks(copies, [0.3] * 12, [0.3] * 14)
    assert found[:2] == [RISK_OF_SIZE[2]] * 2
    assert found[2:] == [0.0] * 12  # many, on a way too long to be walked to its end


def test_an_actor_without_company_bears_all_and_one_that_shares_little_the_rest() -> None:
    found = risks([(0, 1), (0, 2)], [0.06], [0.0, 0.02, 0.04])
    assert found == [ALONE, max(ALONE - 0.02, RISK_OF_SIZE[2]), RISK_OF_SIZE[2]]


def test_an_expert_that_hardly_anyone_asks_for_connects_nobody() -> None:
    pairs = [(0, 0), (0, 1), (1, 2), (1, 3), (2, 1), (2, 2)]
    found = risks(pairs, [0.3, 0.3, 0.01], [0.3] * 4)
    assert found == [RISK_OF_SIZE[2]] * 4
    found = risks(pairs, [0.3, 0.3, 0.2], [0.3] * 4)
    assert found == [RISK_OF_SIZE[4]] * 4


def test_larger_islands_risk_less() -> None:
    assert (np.diff(RISK_OF_SIZE[1:]) < 0).all() and RISK_OF_SIZE[-1] == 0.0


def test_nothing_shared_at_all() -> None:
    assert risks([], [], [0.0, 0.0]) == [ALONE, ALONE]
