"""Every preset, and the defaults: helm, Kubernetes, KubeRay, Serve and the server accept them."""

import functools
import tarfile
from pathlib import Path
from typing import Any

import pytest
import yaml
from ray.serve.schema import ServeDeploySchema

from expertmesh.actors.model.config import load_config
from expertmesh.actors.model.summary import expected_summary
from expertmesh.deploy.preflight import state_bytes
from expertmesh.deploy.serve_app import AppSettings
from tests.helm.chart import (
    CHART,
    GROUPS,
    PRESETS,
    Objects,
    app_arguments,
    container,
    groups,
    pods,
    render,
    serve_config,
    service,
    the,
)
from tests.helm.schemas import check, check_pod
from tests.support.golden import K3_CONFIG
from tests.support.helm_tool import run_helm

ALL = [None, *PRESETS]
IDS = ["defaults", *(path.name.removesuffix("-values.yaml") for path in PRESETS)]

K3_PRESETS = [path for path in PRESETS if "name: kimi-k3" in path.read_text()]
# Of a GPU, and of it for activations, NCCL and CUDA itself.
H200_BYTES, WORKING_BYTES = 141e9, 6e9

rendered = functools.cache(render)


@pytest.fixture(params=ALL, ids=IDS)
def preset(request: pytest.FixtureRequest) -> Path | None:
    path: Path | None = request.param
    return path


@pytest.fixture
def objects(preset: Path | None) -> Objects:
    return rendered(preset)


def test_there_are_presets_for_every_kind_of_cluster() -> None:
    assert {"gpu-h200", "gpu-b200", "kind-nano", "eks", "gke", "airgapped", "autoscaling"} <= {*IDS}


def test_the_guide_lists_them() -> None:
    guide = (CHART.parent / "README.md").read_text()
    assert all(f"| `{name}` |" in guide for name in IDS[1:])


def test_lint(preset: Path | None) -> None:
    done = run_helm("lint", "--strict", CHART, *([] if preset is None else ["-f", preset]))
    assert done.returncode == 0, done.stdout + done.stderr


def test_schemas(objects: Objects) -> None:
    for thing in objects:
        check(thing)
    for _, template in pods(objects):
        check_pod(template)


def test_schemas_are_strict(objects: Objects) -> None:
    pod = next(iter(pods(objects)))[1]
    with pytest.raises(AssertionError, match="banana"):
        check_pod({**pod, "spec": {**pod["spec"], "banana": 1}})
    ray = next(thing for thing in objects if thing["kind"] == "RayService")
    with pytest.raises(AssertionError, match=r"spec.*banana"):
        check({**ray, "spec": {**ray["spec"], "banana": 1}})
    with pytest.raises(AssertionError, match="rayVersion"):
        cluster = {**ray["spec"]["rayClusterConfig"], "rayVersion": 2}
        check({**ray, "spec": {**ray["spec"], "rayClusterConfig": cluster}})


def test_serve_takes_the_configuration(objects: Objects) -> None:
    schema = ServeDeploySchema.model_validate(serve_config(objects))
    assert schema.http_options.port == container(objects, "front-door")["ports"][0]["containerPort"]
    (application,) = schema.applications
    module, _, builder = application.import_path.partition(":")
    assert (module, builder) == ("expertmesh.deploy.serve_app", "build_openai_app")
    settings = AppSettings.model_validate(application.args)
    assert settings.front_doors == groups(objects)["front-door"]["replicas"]
    assert settings.mesh.nodes_may_join


def test_requests_equal_limits_and_probes_let_models_load(objects: Objects) -> None:
    for name, template in pods(objects):
        first = template["spec"]["containers"][0]
        assert first["resources"]["requests"] == first["resources"]["limits"], name
        start = first["startupProbe"]
        assert start["failureThreshold"] * start["periodSeconds"] >= 3600
        assert first["livenessProbe"]["failureThreshold"] >= 3
        for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
            assert "initialDelaySeconds" not in first[probe]


def test_shared_memory_is_memory_and_has_a_size(objects: Objects) -> None:
    for name, template in pods(objects):
        volumes = {volume["name"]: volume for volume in template["spec"]["volumes"]}
        mounts = {
            m["mountPath"]: m["name"] for m in template["spec"]["containers"][0]["volumeMounts"]
        }
        shared = volumes[mounts["/dev/shm"]]["emptyDir"]
        assert shared["medium"] == "Memory" and shared["sizeLimit"], name


def test_nothing_can_be_written_but_what_is_mounted(objects: Objects) -> None:
    for template in [template for _, template in pods(objects)]:
        assert template["spec"]["securityContext"]["runAsNonRoot"] is True
        assert template["spec"]["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        for each in [*template["spec"].get("initContainers", []), *template["spec"]["containers"]]:
            context = each["securityContext"]
            assert context["readOnlyRootFilesystem"] is True
            assert context["allowPrivilegeEscalation"] is False
            assert context["capabilities"]["drop"] == ["ALL"]
            assert "/tmp" in [mount["mountPath"] for mount in each["volumeMounts"]]


def test_names_of_objects_are_their_own(objects: Objects) -> None:
    names = [(thing["kind"], thing["metadata"]["name"]) for thing in objects]
    assert len({*names}) == len(names)


def test_secrets_and_volumes_that_pods_use_are_made_or_named(objects: Objects) -> None:
    made = {(thing["kind"], thing["metadata"]["name"]) for thing in objects}
    for _, template in pods(objects):
        for volume in template["spec"]["volumes"]:
            if config := volume.get("configMap"):
                assert ("ConfigMap", config["name"]) in made or config["name"] == "internal-ca"
        names = [volume["name"] for volume in template["spec"]["volumes"]]
        for mount in template["spec"]["containers"][0]["volumeMounts"]:
            assert mount["name"] in names


def test_the_large_preset_gives_weights_hours() -> None:
    objects = rendered(next(path for path in PRESETS if "h200" in path.name))
    for group in GROUPS:
        probe = container(objects, group)["startupProbe"]
        assert probe["failureThreshold"] * probe["periodSeconds"] >= 2 * 3600


@pytest.mark.parametrize("preset", K3_PRESETS, ids=lambda path: path.name)
def test_weights_and_state_of_k3_fit_an_h200(preset: Path) -> None:
    settings = AppSettings.model_validate(app_arguments(rendered(preset)))
    config = load_config(K3_CONFIG)
    weights = expected_summary(config).attention.total_bytes
    used = weights + state_bytes(config, settings.mesh.engine, dtype_bytes=2)
    assert used + WORKING_BYTES <= H200_BYTES


def test_the_values_file_itself_is_what_an_upgrade_keeps() -> None:
    assert render(CHART / "values.yaml") == rendered(None)


def test_no_service_of_kuberay_is_needed(objects: Objects) -> None:
    """Its own Service would also point at pods without a proxy; the chart's selects front doors."""
    selector: dict[str, Any] = the(objects, "Service", "mesh-expertmesh")["spec"]["selector"]
    for name, template in pods(objects):
        labels = template["metadata"]["labels"]
        assert (selector.items() <= labels.items()) == (name == "front-door")
    assert service(objects)["excludeHeadPodFromServeSvc"] is True
    assert app_arguments(objects)["mesh"]["resources"]["front_door"] == {"expertmesh_front_door": 1}


def test_the_package_renders_the_same(tmp_path: Path) -> None:
    done = run_helm("package", CHART, "--destination", tmp_path)
    assert done.returncode == 0, done.stderr
    (package,) = tmp_path.glob("*.tgz")
    told = run_helm("template", "mesh", package, "--namespace=llm")
    assert [found for found in yaml.load_all(told.stdout, yaml.CSafeLoader) if found] == rendered(
        None
    )
    with tarfile.open(package) as archive:
        assert not [name for name in archive.getnames() if "/ci/" in name]
