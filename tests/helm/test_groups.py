"""Worker groups: alike where they must be, apart where actors are told apart, sized by values."""

import copy
import shlex
from pathlib import Path
from typing import Any

import pytest
from ray.autoscaler._private.kuberay.autoscaling_config import (
    _derive_autoscaling_config_from_ray_cr as autoscaling_config,
)
from ray.scripts.scripts import start as ray_start

from expertmesh.cluster.topology import bundle_of, check_fits
from expertmesh.deploy.serve_app import AppSettings
from tests.helm.chart import (
    PRESETS,
    Objects,
    app_arguments,
    container,
    groups,
    offers,
    pod,
    render,
    service,
    the,
)

AUTOSCALING = next(path for path in PRESETS if "autoscaling" in path.name)
POOLS = ("attention", "experts")
H200 = next(path for path in PRESETS if "h200" in path.name)


def test_both_pools_differ_only_in_what_they_are() -> None:
    same = {"state.disk.type": "none", "state.encryption.existingSecret": ""}
    objects = render(H200, **{"experts.slotsPerActor": None}, **same)
    one, two = (copy.deepcopy(groups(objects)[name]["template"]) for name in POOLS)
    for template, name in zip((one, two), POOLS, strict=True):
        assert template["metadata"]["labels"].pop("app.kubernetes.io/component") == name
        assert template["spec"]["containers"][0].pop("name") == f"ray-{name}"
    assert one == two


@pytest.mark.parametrize("preset", [None, *PRESETS], ids=lambda path: path and path.name)
def test_the_groups_offer_just_what_the_mesh_asks_for(preset: Path | None) -> None:
    objects = render(preset)
    settings = AppSettings.model_validate(app_arguments(objects)).mesh
    offered: dict[str, float] = {"CPU": 1e6}
    for group in groups(objects).values():
        own = offers(group) | {"GPU": int(group["rayStartParams"]["num-gpus"])}
        for name, amount in own.items():
            offered[name] = offered.get(name, 0) + amount * group.get("replicas", 1)
    gpus = settings.gpus_per_actor or 0
    asked = [bundle_of(settings, gpus, "attention")] * settings.attention_replicas
    asked += [bundle_of(settings, gpus, "expert")] * settings.expert_actors
    check_fits(asked, offered)
    assert offered["expertmesh_attention"] == settings.attention_replicas
    assert offered["expertmesh_expert"] == settings.expert_actors
    assert offered["GPU"] == gpus * settings.actors
    assert {*settings.resources.control} <= {*offers(groups(objects)["head"])}


def test_only_values_decide_sizes() -> None:
    sizes = {"cpu": "7", "memory": "77Gi"}
    gpus = {"actorsPerPod": 3, "gpusPerActor": 2, "gpuResourceName": "amd.com/gpu"}
    pool = {"resources": sizes} | gpus
    objects = render(
        head={"resources": sizes}, frontDoor={"resources": sizes}, attention=pool, experts=pool
    )
    for name in groups(objects):
        wanted = sizes | {"amd.com/gpu": 6} if name in POOLS else sizes
        assert container(objects, name)["resources"] == {"requests": wanted, "limits": wanted}
    assert groups(objects)["experts"]["rayStartParams"]["num-gpus"] == "6"
    assert app_arguments(objects)["mesh"]["gpus_per_actor"] == 2


def test_without_an_expert_pool_attention_holds_all() -> None:
    objects = render(experts={"replicas": 0})
    assert "experts" not in groups(objects)
    assert app_arguments(objects)["mesh"]["expert_actors"] == 0


def start_command(group: dict[str, Any]) -> list[str]:
    """What the shell in the pod makes of KubeRay's command line."""
    flags = [
        f"--{name}" if value.lower() == "true" else f"--{name}={value}"
        for name, value in group["rayStartParams"].items()
    ]
    return shlex.split(" ".join(flags))


def test_ray_takes_the_start_parameters() -> None:
    for name, group in groups(render(H200)).items():
        head = ["--head"] if name == "head" else ["--address=head:6379"]
        context = ray_start.make_context("start", [*head, *start_command(group)])
        assert context.params["resources"].startswith('{"expertmesh_')
        assert context.params["object_store_memory"] == 134217728
        assert context.params["disable_usage_stats"] is True


def test_rays_autoscaler_knows_which_group_an_actor_needs() -> None:
    objects = render(AUTOSCALING)
    ray_cluster = {
        "metadata": {"name": "c", "namespace": "llm"},
        "spec": service(objects)["rayClusterConfig"],
    }
    config = autoscaling_config(ray_cluster)
    types = config["available_node_types"]
    assert types["headgroup"]["resources"]["expertmesh_control"] == 1
    assert types["headgroup"]["resources"]["CPU"] == 0
    assert types["attention"]["resources"] | {"memory": 0} == {
        "CPU": 16, "GPU": 2, "memory": 0, "expertmesh_attention": 2,
    }  # fmt: skip
    assert types["experts"]["resources"]["expertmesh_expert"] == 4
    assert (types["experts"]["min_workers"], types["experts"]["max_workers"]) == (2, 8)
    assert config["idle_timeout_minutes"] == 10


def test_the_mesh_scales_between_the_same_limits() -> None:
    settings = AppSettings.model_validate(app_arguments(render(AUTOSCALING))).mesh.autoscale
    assert settings is not None and settings.experts is not None and settings.attention is not None
    assert (settings.experts.min_actors, settings.experts.max_actors) == (8, 32)
    assert (settings.attention.min_replicas, settings.attention.max_replicas) == (2, 12)
    assert settings.experts.high_busy_share == 0.85


def test_only_a_head_that_autoscales_gets_a_token() -> None:
    for preset, wanted in ((None, False), (AUTOSCALING, True)):
        objects = render(preset)
        for name in groups(objects):
            token = pod(objects, name)["automountServiceAccountToken"]
            assert token is (wanted and name == "head")


def test_rdma_is_the_one_exception() -> None:
    objects = render(rdma={"enabled": True, "resources": {"rdma/hca": 1}})
    for name in groups(objects):
        context = container(objects, name)["securityContext"]["capabilities"]
        devices = container(objects, name)["resources"]["limits"].get("rdma/hca")
        if name in POOLS:
            assert (context, devices) == ({"drop": ["ALL"], "add": ["IPC_LOCK"]}, 1)
        else:
            assert (context, devices) == ({"drop": ["ALL"]}, None)


def checksum(objects: Objects) -> str:
    sums = {
        group["template"]["metadata"]["annotations"]["checksum/config"]
        for group in groups(objects).values()
    }
    (one,) = sums
    return str(one)


def test_pods_change_with_the_configuration_and_only_with_it() -> None:
    before = checksum(render())
    assert checksum(render(mesh={"engine": {"slots": 7}})) != before
    assert checksum(render(model={"name": "other"})) != before
    assert checksum(render(auth={"adminToken": {"value": "a"}})) != before
    assert (
        checksum(render(service={"port": 81}, metrics={"serviceMonitor": {"enabled": True}}))
        == before
    )


def test_keys_are_read_again_without_new_pods() -> None:
    one, two = (render(auth={"keys": [{"name": "a", "key": key}]}) for key in ("em-one", "em-two"))
    assert the(one, "Secret") != the(two, "Secret")
    assert checksum(one) == checksum(two)


def test_a_fetch_brings_shards_only_where_actors_run() -> None:
    objects = render(AUTOSCALING)
    for name in groups(objects):
        (fetch,) = pod(objects, name)["initContainers"]
        env = {entry["name"]: entry["value"] for entry in fetch["env"]}
        assert env["MODEL_PART"] == ("all" if name in POOLS else "config")
        assert env["MODEL_PATH"] == "/models/Kimi-Linear-48B-A3B-Instruct"
    mesh = app_arguments(objects)["mesh"]
    assert mesh["load"]["model"] == "/models/Kimi-Linear-48B-A3B-Instruct"
    assert mesh["check_checkpoint"] is False
