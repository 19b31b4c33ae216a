from pathlib import Path

import pytest
from pydantic import ValidationError

from expertmesh.actors.model.loading import LoadSettings
from expertmesh.cluster.settings import ClusterSettings
from expertmesh.cluster.topology import (
    Node,
    TopologyError,
    bundles,
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
    assert bundles(settings(), 1) == [{"CPU": 1.0, "GPU": 1.0}] * 3


def test_what_cannot_fit_is_refused_with_both_numbers() -> None:
    check_fits(bundles(settings(), 0), {"CPU": 3.0})
    with pytest.raises(TopologyError, match="3 actors need 3 Ray CPU slots and the cluster has 2"):
        check_fits(bundles(settings(), 0), {"CPU": 2.0})
    with pytest.raises(TopologyError, match="GPU slots and the cluster has 0"):
        check_fits(bundles(settings(), 1), {"CPU": 8.0})


def test_unknown_keys_are_refused_by_name() -> None:
    with pytest.raises(ValidationError, match="expert_actor"):
        settings(expert_actor=3)
    with pytest.raises(ValidationError, match="frozen"):
        settings().expert_actors = 3  # type: ignore[misc]


def test_actor_names_are_in_rank_order() -> None:
    assert settings(name="m", attention_replicas=2, expert_actors=1).actor_names == (
        "m-attention-0",
        "m-attention-1",
        "m-expert-0",
    )
