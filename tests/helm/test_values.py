"""Odd values survive, or are refused with the path or the reason."""

import json
from typing import Any

import pytest
import yaml

from tests.helm.chart import CHART, PRESETS, Refused, container, groups, render, the
from tests.helm.schemas import check

DEFAULTS: dict[str, Any] = yaml.safe_load((CHART / "values.yaml").read_text())
SCHEMA: dict[str, Any] = json.loads((CHART / "values.schema.json").read_text())


def refusal(values: dict[str, Any]) -> str:
    with pytest.raises(Refused) as refused:
        render(**values)
    return str(refused.value)


def test_null_for_what_may_be_left_out() -> None:
    optional = [key for key in DEFAULTS if key not in SCHEMA["required"]]
    nested = [f"{top}.{key}" for top, key in nested_keys() if key not in required(top)]
    assert len(optional) > 20 and len(nested) > 30
    for keys in (optional, nested):
        for thing in render(PRESETS[0], **dict.fromkeys(keys)):
            check(thing)


def test_null_for_what_is_needed_is_refused_with_its_path() -> None:
    missing = refusal(dict.fromkeys(SCHEMA["required"]))
    for key in SCHEMA["required"]:
        assert f"'{key}'" in missing
    needed = [(top, key) for top, key in nested_keys() if key in required(top)]
    missing = refusal({f"{top}.{key}": None for top, key in needed})
    for top, key in needed:
        (line,) = [line for line in missing.splitlines() if f"at '/{top}': missing" in line]
        assert f"'{key}'" in line


def nested_keys() -> list[tuple[str, str]]:
    return [
        (top, key)
        for top, value in DEFAULTS.items()
        if isinstance(value, dict) and "properties" in SCHEMA["properties"][top]
        for key in value
    ]


def required(top: str) -> list[str]:
    names: list[str] = SCHEMA["properties"][top]["required"]
    return names


def test_wrong_types_are_refused_with_their_paths() -> None:
    wrong = {
        "attention.replicas": ("8", "/attention/replicas': got string, want integer"),
        "experts.actorsPerPod": (1.5, "/experts/actorsPerPod': got number, want integer"),
        "service.port": ("8000", "/service/port': got string, want integer"),
        "frontDoor.replicas": (0, "/frontDoor/replicas': minimum"),
        "autoscaling.attention.minReplicas": (0, "/autoscaling/attention/minReplicas': minimum"),
        "grpc.port": (70000, "/grpc/port': maximum"),
        "extraEnv": ([{"name": "A", "value": 1}], "/extraEnv/0/value': got number, want string"),
        "head.resources.memory": (8, "/head/resources/memory': got number"),
        "experts.resources.memory": ("8 GB", "/experts/resources/memory': '8 GB' does not match"),
        "head.shmSize": ("1GiB", "/head/shmSize': '1GiB' does not match"),
        "nodeSelector": ({"gpu": True}, "/nodeSelector/gpu': got boolean, want string"),
        "tolerations": ({"key": "gpu"}, "/tolerations': got object, want array"),
        "head.tolerations": ([{"Key": "a"}], "/head/tolerations/0': additional properties 'Key'"),
        "imagePullSecrets": (["internal"], "/imagePullSecrets/0': got string, want object"),
        "grpc.enabled": ("true", "/grpc/enabled': got string, want boolean"),
        "model.source": ("s3", "/model/source': value must be one of"),
        "model.folder": ("../../etc", "/model/folder': '../../etc' does not match"),
        "replicas": (3, "additional properties 'replicas' not allowed"),
        "experts.replica": (3, "/experts': additional properties 'replica' not allowed"),
        "upgrade.strategy": ("Recreate", "/upgrade/strategy': value must be one of"),
        "probes.liveness.failureThreshold": (1, "/probes/liveness/failureThreshold': minimum"),
        "podAnnotations": ({"a": 1}, "/podAnnotations/a': got number, want string"),
        "fullnameOverride": ("Mesh_1", "/fullnameOverride': 'Mesh_1' does not match"),
        "auth.keys": (["em-secret"], "/auth/keys/0': got string, want object"),
    }
    told = refusal({key: value for key, (value, _) in wrong.items()})
    for _, path in wrong.values():
        assert path in told


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ({"model": {"numExperts": 4}, "experts": {"replicas": 5}}, "are 5 actors, more than"),
        (
            {"model": {"numExperts": 64}, "experts": {"replicas": 3, "slotsPerActor": 20}},
            "3 expert actors times experts.slotsPerActor 20 hold fewer than model.numExperts 64",
        ),
        (
            {"autoscaling": {"enabled": True, "experts": {"minReplicas": 5, "maxReplicas": 2}}},
            "autoscaling.experts.minReplicas 5 exceeds maxReplicas 2",
        ),
        (
            {"autoscaling": {"enabled": True}, "attention": {"replicas": 9}},
            "attention.replicas 9 must be from autoscaling.attention.minReplicas 1 to maxReplicas",
        ),
        (
            {"autoscaling": {"enabled": True}, "model": {"numExperts": 6}},
            "autoscaling.experts.maxReplicas 8 times",
        ),
        ({"attention": {"gpusPerActor": 1}}, "must be equal"),
        (
            {"attention": {"gpusPerActor": 0.3}, "experts": {"gpusPerActor": 0.3}},
            "is not a whole number of GPUs per pod",
        ),
        ({"model": {"device": "cuda"}}, "model.device cuda needs"),
        ({"head": {"shmSize": "128Mi"}}, "head.shmSize 128Mi must be a tenth larger"),
        ({"experts": {"shmSize": "8Gi"}}, "experts.shmSize 8Gi must be below"),
        ({"model": {"source": "pvc"}}, "needs model.pvc.existingClaim or model.pvc.create"),
        (
            {"model": {"source": "pvc", "pvc": {"create": True, "existingClaim": "x"}}},
            "exclude each other",
        ),
        (
            {"model": {"source": "pvc", "pvc": {"create": True, "accessModes": ["ReadOnlyMany"]}}},
            "starts empty, and nobody could fill this one",
        ),
        ({"model": {"source": "hostPath"}}, "needs model.hostPath.path"),
        ({"model": {"source": "objectStore"}}, "needs model.objectStore.uri"),
        (
            {"auth": {"existingSecret": "a", "keys": [{"name": "b", "key": "em-c"}]}},
            "auth.existingSecret and auth.keys exclude each other",
        ),
        (
            {"auth": {"adminToken": {"existingSecret": "a", "value": "b"}}},
            "auth.adminToken.existingSecret and auth.adminToken.value",
        ),
        ({"ingress": {"enabled": True}}, "ingress.enabled needs ingress.hosts"),
        (
            {"grpc": {"ingress": {"enabled": True, "hosts": [{"host": "a"}]}}},
            "grpc.ingress.enabled needs grpc.enabled",
        ),
        (
            {"frontDoor": {"terminationGracePeriodSeconds": 60}},
            "must exceed drain.endpointSeconds + drain.seconds = 315",
        ),
        ({"mesh": {"expert_actors": 3}}, "mesh.expert_actors is decided by other values"),
        ({"mesh": {"load": {"model": "/x"}}}, "mesh.load is decided by other values"),
        ({"mesh": {"autoscale": {}}}, "mesh.autoscale is decided by the autoscaling values"),
        ({"head": {"rayStartParams": {"num-gpus": "1"}}}, "rayStartParams.num-gpus is decided"),
    ],
)
def test_impossible_combinations_are_refused(values: dict[str, Any], reason: str) -> None:
    assert reason in refusal(values)


@pytest.mark.parametrize("release", ["r" * 53, "expertmesh", "a"])
def test_names_fit(release: str) -> None:
    objects = render(PRESETS[0], release=release)
    names = [thing["metadata"]["name"] for thing in objects]
    assert all(len(name) <= 63 for name in names)
    # KubeRay adds up to 28 characters to a RayService's own.
    assert len(the(objects, "RayService")["metadata"]["name"]) <= 35
    for thing in objects:
        for value in thing["metadata"]["labels"].values():
            assert len(value) <= 63
        check(thing)


def test_long_names_that_begin_alike_stay_apart() -> None:
    one, two = (render(release="r" * 52 + end)[0]["metadata"]["name"] for end in "ab")
    assert one != two


def test_values_reach_every_group_and_groups_add_their_own() -> None:
    toleration = {"key": "pool", "operator": "Equal", "value": "experts", "effect": "NoExecute"}
    objects = render(
        imagePullSecrets=[{"name": "internal"}],
        tolerations=[{"key": "all", "operator": "Exists"}],
        nodeSelector={"zone": "a"},
        extraEnv=[{"name": "A", "value": "1"}],
        commonLabels={"team": "llm"},
        priorityClassName="high",
        experts={
            "tolerations": [toleration],
            "nodeSelector": {"gpu": "yes"},
            "priorityClassName": "low",
        },
    )
    for name, group in groups(objects).items():
        spec, expert = group["template"]["spec"], name == "experts"
        assert spec["imagePullSecrets"] == [{"name": "internal"}]
        assert spec["tolerations"] == [{"key": "all", "operator": "Exists"}] + [toleration] * expert
        assert spec["nodeSelector"] == {"zone": "a"} | ({"gpu": "yes"} if expert else {})
        assert spec["priorityClassName"] == ("low" if expert else "high")
        assert {"name": "A", "value": "1"} in container(objects, name)["env"]
        assert group["template"]["metadata"]["labels"]["team"] == "llm"
    test = the(objects, "Pod")["spec"]
    assert test["imagePullSecrets"] == [{"name": "internal"}]
    assert test["tolerations"] == [{"key": "all", "operator": "Exists"}]
    assert all(thing["metadata"]["labels"]["team"] == "llm" for thing in objects)


def test_objects_of_ones_own_are_templates() -> None:
    config = {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": "{{ .Release.Name }}-x"},
    }
    assert the(render(extraObjects=[config]), "ConfigMap", "mesh-x")
