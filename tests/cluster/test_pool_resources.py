"""Custom Ray resources decide which kinds of nodes the processes of a mesh run on."""

import shutil
from collections.abc import Sequence
from pathlib import Path

import pytest
from pydantic import ValidationError

from expertmesh.actors.model.checkpoint import CheckpointError
from expertmesh.actors.model.loading import LoadSettings
from expertmesh.cluster.launch import check_model
from expertmesh.cluster.settings import ClusterSettings, PoolResources
from expertmesh.cluster.topology import TopologyError, bundle_of, check_fits
from tests.support.golden import GOLDEN

POOLS = PoolResources(attention={"expertmesh_attention": 1}, experts={"expertmesh_expert": 1})


def settings(**changes: object) -> ClusterSettings:
    return ClusterSettings(**{"load": LoadSettings(model=Path("/m")), **changes})


def bundles(own: ClusterSettings, attention: int, experts: int) -> Sequence[dict[str, float]]:
    return [bundle_of(own, 1, "attention")] * attention + [bundle_of(own, 1, "expert")] * experts


def test_each_kind_asks_for_its_own() -> None:
    own = settings(resources=POOLS, cpus_per_actor=0.1)
    assert bundle_of(own, 1, "attention") == {"CPU": 0.1, "GPU": 1, "expertmesh_attention": 1}
    assert bundle_of(own, 0, "expert") == {"CPU": 0.1, "expertmesh_expert": 1}


def test_a_pool_without_enough_nodes_is_named_with_its_own_numbers() -> None:
    own = settings(resources=POOLS, cpus_per_actor=0.1)
    cluster = {"CPU": 64.0, "GPU": 8.0, "expertmesh_attention": 2.0, "expertmesh_expert": 3.0}
    check_fits(bundles(own, 2, 3), cluster)
    message = r"4 actors need 4 Ray expertmesh_expert slots and .* 3"
    with pytest.raises(TopologyError, match=message):
        check_fits(bundles(own, 2, 4), cluster)
    with pytest.raises(TopologyError, match=r"1 actors need 1 Ray expertmesh_attention .* has 0"):
        check_fits(bundles(own, 1, 0), {"CPU": 1, "GPU": 1})


def test_decimal_fractions_that_just_fit() -> None:
    check_fits(bundles(settings(cpus_per_actor=0.1), 0, 3), {"CPU": 0.3, "GPU": 3})


@pytest.mark.parametrize(
    ("resources", "message"),
    [
        ({"experts": {"GPU": 1}}, "GPU is not a custom resource"),
        ({"control": {"head": 0}}, "head must be more than 0"),
        ({"expert": {}}, "expert"),
    ],
)
def test_what_is_no_custom_resource_is_refused(resources: object, message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        settings(resources=resources)


def test_a_control_plane_without_shards_takes_the_config_alone(tmp_path: Path) -> None:
    shutil.copy(GOLDEN / "kimi_k3-tiny" / "config.json", tmp_path)
    bare = {"load": LoadSettings(model=tmp_path)}
    with pytest.raises(CheckpointError):
        check_model(settings(**bare))
    assert check_model(settings(**bare, check_checkpoint=False)).num_experts > 0
