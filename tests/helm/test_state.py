"""Where attention pods keep cached state, and what is refused of it."""

from typing import Any

import pytest
import yaml

from expertmesh.deploy.serve_app import AppSettings
from tests.helm.chart import (
    CHART,
    GROUPS,
    PRESETS,
    Objects,
    Refused,
    app_arguments,
    container,
    pod,
    render,
)
from tests.helm.schemas import check

H200 = next(path for path in PRESETS if "h200" in path.name)
HOST = {"type": "hostPath", "hostPath": "/mnt/nvme/state", "size": "10Gi"}


def settings(objects: Objects) -> Any:
    return AppSettings.model_validate(app_arguments(objects)).mesh.engine.state


def volumes(objects: Objects, group: str) -> list[dict[str, Any]]:
    return [v for v in pod(objects, group)["volumes"] if v["name"] == "state"]


def test_by_default_there_is_memory_and_no_disk() -> None:
    objects = render()
    state = settings(objects)
    assert (state.prefix_cache, state.snapshots, state.host_bytes) == (True, 16, 256 << 20)
    assert state.disk is None and (state.codec, state.kv_mode) == ("lossless", "exact")
    assert not any(volumes(objects, group) for group in GROUPS)


def test_what_values_say_reaches_the_engine_beside_what_mesh_adds() -> None:
    objects = render(
        state={"prefixCache": False, "snapshots": 3, "hostSize": "1500M", "codec": "int8",
               "mode": "select", "offloadSize": "1G", "offloadDiskSize": "3G", "disk": HOST},
        mesh={"engine": {"pages": 77, "state": {"window_tokens": 1024}}},
    )  # fmt: skip
    state = settings(objects)
    assert (state.prefix_cache, state.snapshots, state.host_bytes) == (False, 3, 1_500_000_000)
    assert (state.codec, state.kv_mode, state.window_tokens) == ("int8", "select", 1024)
    assert (state.offload_bytes, state.offload_disk_bytes) == (1_000_000_000, 3_000_000_000)
    assert AppSettings.model_validate(app_arguments(objects)).mesh.engine.pages == 77


@pytest.mark.parametrize(
    ("disk", "volume", "nbytes"),
    [
        (HOST, {"hostPath": {"path": "/mnt/nvme/state", "type": "DirectoryOrCreate"}}, 10 << 30),
        (
            {"type": "claim", "existingClaim": "mine", "size": "2T"},
            {"persistentVolumeClaim": {"claimName": "mine"}},
            2 * 10**12,
        ),
        ({"type": "ephemeral", "size": "10G", "storageClass": "fast"}, None, 9 * 10**9),
    ],
)
def test_attention_pods_alone_have_the_volume(
    disk: dict[str, Any], volume: dict[str, Any] | None, nbytes: int
) -> None:
    objects = render(**{f"state.disk.{key}": value for key, value in disk.items()})
    state = settings(objects)
    assert state.disk_bytes == nbytes
    for group in GROUPS:
        mounts = [m for m in container(objects, group)["volumeMounts"] if m["name"] == "state"]
        assert bool(mounts) == bool(volumes(objects, group)) == (group == "attention")
    (mount,) = [m for m in container(objects, "attention")["volumeMounts"] if m["name"] == "state"]
    assert mount["mountPath"] == str(state.disk) and not mount.get("readOnly")
    (found,) = volumes(objects, "attention")
    if volume is not None:
        assert found == {"name": "state"} | volume
    else:
        claim = found["ephemeral"]["volumeClaimTemplate"]["spec"]
        assert claim["storageClassName"] == "fast"
        assert claim["resources"]["requests"]["storage"] == "10G"
    for thing in objects:
        check(thing)


def test_the_secret_goes_to_those_who_read_and_write() -> None:
    objects = render(H200)
    for group in GROUPS:
        found = [
            e for e in container(objects, group)["env"] if e["name"] == "EXPERTMESH_STATE_SECRET"
        ]
        assert bool(found) == (group == "attention")
    assert found == [] and settings(objects).disk is not None
    (entry,) = [
        e for e in container(objects, "attention")["env"] if e["name"] == "EXPERTMESH_STATE_SECRET"
    ]
    assert entry["valueFrom"]["secretKeyRef"] == {"name": "expertmesh-state", "key": "secret"}


def test_a_volume_of_its_own_has_room_for_old_pages_too() -> None:
    objects = render(
        **{"state.disk.type": "ephemeral", "state.disk.size": "10G", "state.offloadDiskSize": "2G",
           "attention.actorsPerPod": 2, "experts.replicas": 0}
    )  # fmt: skip
    (volume,) = volumes(objects, "attention")
    claim = volume["ephemeral"]["volumeClaimTemplate"]["spec"]
    assert claim["resources"]["requests"]["storage"] == "14000000000"
    state = settings(objects)
    assert (state.disk_bytes, state.offload_disk_bytes) == (9 * 10**9, 2 * 10**9)
    for thing in objects:
        check(thing)


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ({"state.disk.type": "hostPath"}, "needs state.disk.hostPath"),
        ({"state.disk.type": "claim"}, "needs state.disk.existingClaim"),
        ({"state.disk.type": "ephemeral", "state.disk.size": "70Mi"}, "at least 80Mi"),
        ({"state.offloadDiskSize": "1G"}, "state.offloadDiskSize needs state.disk"),
        ({"state.encryption.existingSecret": "x"}, "nothing else is encrypted"),
        ({"state.hostSize": "3Gi"}, "must be below attention.resources.memory 4Gi"),
        (
            {"state.hostSize": "1Gi", "attention.actorsPerPod": 3, "experts.replicas": 0},
            "state.hostSize 1Gi and state.offloadSize 256Mi, times attention.actorsPerPod 3",
        ),
        ({"state.offloadSize": "3500Mi"}, "must be below attention.resources.memory 4Gi"),
        ({"mesh": {"engine": {"state": {"disk": "/x"}}}}, "mesh.engine.state.disk is decided by"),
        ({"mesh": {"engine": {"state": {"snapshots": 2}}}}, "mesh.engine.state.snapshots is"),
        ({"state.codec": "int4"}, "state.codec int4 needs state.disk: host memory would keep"),
        ({"state.codec": "zip"}, "/state/codec': value must be one of"),
        ({"state.snapshots": 0}, "/state/snapshots': minimum"),
        ({"state.disk.mountPath": "state"}, "/state/disk/mountPath': 'state' does not match"),
    ],
)
def test_what_does_not_fit_is_refused(values: dict[str, Any], reason: str) -> None:
    with pytest.raises(Refused) as refused:
        render(**values)
    assert reason in str(refused.value)


def test_defaults_are_the_server_s_own() -> None:
    from expertmesh.actors.state.settings import StateSettings

    values = yaml.safe_load((CHART / "values.yaml").read_text())["state"]
    state = StateSettings()
    assert (values["prefixCache"], values["snapshots"]) == (state.prefix_cache, state.snapshots)
    assert (values["codec"], values["mode"]) == (state.codec, state.kv_mode)
    assert values["hostSize"] == f"{state.host_bytes >> 20}Mi"
    assert values["offloadSize"] == f"{state.offload_bytes >> 20}Mi"
    assert values["offloadDiskSize"] == str(state.offload_disk_bytes)
