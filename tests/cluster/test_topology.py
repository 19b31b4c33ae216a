from pathlib import Path

import pytest
from pydantic import ValidationError

from expertmesh.actors.model.loading import LoadSettings
from expertmesh.cluster.settings import ClusterSettings
from expertmesh.cluster.topology import (
    Node,
    TopologyError,
    bundle_of,
    check_fits,
    gpus_per_actor,
    threads_by_rank,
)


def settings(**changes: object) -> ClusterSettings:
    return ClusterSettings(**{"load": LoadSettings(model=Path("/m")), **changes})


def node(name: str, cores: int, gpus: float = 0) -> Node:
    return Node(name, "10.0.0.1", name, cores, gpus)


def test_threads_share_the_cores_of_their_own_node() -> None:
    nodes = [node("a", 16), node("b", 2)]
    assert threads_by_rank(["a", "a", "a", "b", "b", "b"], nodes) == [5, 5, 5, 1, 1, 1]


def test_one_gpu_each_where_there_are_gpus() -> None:
    nodes = [node("a", 16, gpus=8), node("head", 4)]
    assert gpus_per_actor(settings(), nodes) == 1
    assert gpus_per_actor(settings(gpus_per_actor=0.5), nodes) == 0.5
    assert gpus_per_actor(settings(load=LoadSettings(model="/m", device="cpu")), nodes) == 0
    assert gpus_per_actor(settings(), [node("a", 2)]) == 0
    assert bundle_of(settings(), 1, "expert") == {"CPU": 1.0, "GPU": 1.0}


def test_what_cannot_fit_is_refused_with_both_numbers() -> None:
    three = [bundle_of(settings(), 0, "expert")] * 3
    check_fits(three, {"CPU": 3.0})
    with pytest.raises(TopologyError, match="3 actors need 3 Ray CPU slots and the cluster has 2"):
        check_fits(three, {"CPU": 2.0})
    with pytest.raises(TopologyError, match="GPU slots and the cluster has 0"):
        check_fits([bundle_of(settings(), 1, "expert")] * 3, {"CPU": 8.0})


def test_unknown_keys_are_refused_by_name() -> None:
    with pytest.raises(ValidationError, match="expert_actor"):
        settings(expert_actor=3)
    with pytest.raises(ValidationError, match="frozen"):
        settings().expert_actors = 3  # type: ignore[misc]


@pytest.mark.parametrize(
    ("experts", "actors", "slots"),
    [(896, 64, 15), (8, 2, 8), (7, 3, 4), (8, 1, 8), (12, 5, 3)],
)
def test_unset_slots_are_the_fewest_that_let_any_one_actor_go(
    experts: int, actors: int, slots: int
) -> None:
    assert settings().slots(experts, actors) == slots
    if actors > 1:
        assert (actors - 1) * slots >= experts > (actors - 1) * (slots - 1)


def test_set_slots_are_taken_as_they_are() -> None:
    assert settings(slots_per_actor=5).slots(8, 2) == 5
    assert settings(slots_per_actor=50).slots(8, 2) == 8
