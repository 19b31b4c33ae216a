"""The objects around the RayService: Services, Secrets, budgets, network rules, volumes."""

import json
from typing import Any

import pytest
import yaml

from expertmesh.deploy.auth.keys import hash_key, parse_keys
from expertmesh.deploy.serve_app import AppSettings
from tests.helm.chart import (
    GROUPS,
    PRESETS,
    Objects,
    app_arguments,
    container,
    groups,
    kinds,
    pod,
    pods,
    render,
    the,
)

AUTOSCALING = next(path for path in PRESETS if "autoscaling" in path.name)
AIRGAPPED = next(path for path in PRESETS if "airgapped" in path.name)
GKE = next(path for path in PRESETS if "gke" in path.name)


# --- keys ---------------------------------------------------------------------------------------


def test_keys_from_values_become_a_keys_file_of_hashes() -> None:
    keys = [
        {"name": "alice", "key": "em-a", "requests_per_minute": 60},
        {"name": "bob", "key": "em-b", "expires": "2030-01-31"},
    ]
    objects = render(auth={"keys": keys})
    secret = the(objects, "Secret", "-api-keys")
    text = secret["stringData"]["keys"]
    alice, bob = parse_keys(text.encode())
    assert (alice.name, alice.hash, alice.requests_per_minute) == ("alice", hash_key("em-a"), 60)
    assert (bob.hash, bob.expires and bob.expires.year) == (hash_key("em-b"), 2030)
    assert "em-a" not in yaml.safe_dump_all(objects)
    for name in GROUPS:
        (volume,) = [v for v in pod(objects, name)["volumes"] if v["name"] == "api-keys"]
        assert volume["secret"]["secretName"] == secret["metadata"]["name"]
        (mount,) = [m for m in container(objects, name)["volumeMounts"] if m["name"] == "api-keys"]
        assert "subPath" not in mount  # it would never see a changed Secret
        path = f"{mount['mountPath']}/{volume['secret']['items'][0]['path']}"
        assert path == app_arguments(objects)["edge"]["auth"]["keys_file"]


def test_a_secret_that_exists_is_mounted_and_none_is_made() -> None:
    objects = render(auth={"existingSecret": "mine", "existingSecretKey": "file.yaml"})
    assert "Secret" not in kinds(objects)
    (volume,) = [v for v in pod(objects, "front-door")["volumes"] if v["name"] == "api-keys"]
    assert volume["secret"]["secretName"] == "mine"
    assert volume["secret"]["items"] == [{"key": "file.yaml", "path": "keys"}]


def test_the_admin_token_comes_from_a_secret() -> None:
    for auth, name in (
        ({"value": "t"}, "mesh-expertmesh-admin"),
        ({"existingSecret": "mine"}, "mine"),
    ):
        objects = render(auth={"adminToken": auth})
        (entry,) = [
            e
            for e in container(objects, "front-door")["env"]
            if e["name"] == "EXPERTMESH_ADMIN_TOKEN"
        ]
        assert entry["valueFrom"]["secretKeyRef"] == {"name": name, "key": "token"}


# --- ways in ------------------------------------------------------------------------------------


def test_ingresses_point_at_ports_of_services() -> None:
    objects = render(GKE)
    for name in ("mesh-expertmesh", "mesh-expertmesh-grpc"):
        (rule,) = the(objects, "Ingress", name)["spec"]["rules"]
        backend = rule["http"]["paths"][0]["backend"]["service"]
        service = the(objects, "Service", backend["name"])
        (port,) = service["spec"]["ports"]
        assert (backend["name"], backend["port"]["name"]) == (name, port["name"])
        targets = [port["name"] for port in container(objects, "front-door")["ports"]]
        assert port["targetPort"] in targets
    edge = AppSettings.model_validate(app_arguments(objects)).edge
    assert (edge.grpc.host, edge.grpc.port) == ("0.0.0.0", 50051)


def test_googles_load_balancer_lets_streams_live() -> None:
    objects = render(GKE)
    annotations = the(objects, "Service", "mesh-expertmesh")["metadata"]["annotations"]
    config = the(objects, "BackendConfig")
    named = json.loads(annotations["cloud.google.com/backend-config"])
    assert named == {"default": config["metadata"]["name"]}
    assert config["spec"]["timeoutSec"] >= 600
    door = container(objects, "front-door")
    probe = door["readinessProbe"]["httpGet"]
    ports = {port["name"]: port["containerPort"] for port in door["ports"]}
    health = config["spec"]["healthCheck"]
    assert (health["requestPath"], health["port"]) == (probe["path"], ports[probe["port"]])


# --- budgets ------------------------------------------------------------------------------------


def test_budgets_leave_one_pod_to_evict() -> None:
    objects = render(frontDoor={"replicas": 3}, experts={"replicas": 8})
    left = {t["metadata"]["name"]: t["spec"]["minAvailable"] for t in budgets(objects)}
    prefix = "mesh-expertmesh-"
    assert left == {f"{prefix}front-door": 2, f"{prefix}attention": 0, f"{prefix}experts": 7}
    for budget in budgets(objects):
        labels = budget["spec"]["selector"]["matchLabels"].items()
        found = [n for n, tpl in pods(objects) if labels <= tpl["metadata"]["labels"].items()]
        assert found == [budget["metadata"]["labels"]["app.kubernetes.io/component"]]
        assert "maxUnavailable" not in budget["spec"]  # wants a scale subresource


def test_budgets_count_from_the_least_that_autoscaling_leaves() -> None:
    left = {t["metadata"]["name"]: t["spec"]["minAvailable"] for t in budgets(render(AUTOSCALING))}
    assert (left["mesh-expertmesh-attention"], left["mesh-expertmesh-experts"]) == (0, 1)
    assert "mesh-expertmesh-head" in {t["metadata"]["name"] for t in budgets(render(AIRGAPPED))}


def budgets(objects: Objects) -> Objects:
    return [thing for thing in objects if thing["kind"] == "PodDisruptionBudget"]


# --- network ------------------------------------------------------------------------------------


def rules(objects: Objects, group: str, way: str) -> list[dict[str, Any]]:
    """The rules that hold for a group's pods; way: ingress or egress."""
    labels = groups(objects)[group]["template"]["metadata"]["labels"].items()
    return [
        rule
        for thing in objects
        if thing["kind"] == "NetworkPolicy"
        and thing["spec"]["podSelector"]["matchLabels"].items() <= labels
        for rule in thing["spec"].get(way, [])
    ]


def ports(found: list[dict[str, Any]]) -> set[Any]:
    return {port["port"] for rule in found for port in rule.get("ports", [])}


def test_who_may_come_in() -> None:
    objects = render()
    for name in GROUPS:
        # Ray and the exchange: from the release's own pods, on any port.
        own = [rule for rule in rules(objects, name, "ingress") if "ports" not in rule]
        assert [list(peer) for rule in own for peer in rule["from"]] == [["podSelector"]]
    assert ports(rules(objects, "experts", "ingress")) == {"metrics"}
    assert ports(rules(objects, "front-door", "ingress")) == {"metrics", "serve"}
    assert ports(rules(objects, "head", "ingress")) == {"metrics", "dashboard", "serve", "agent"}
    named = {port["name"] for name in GROUPS for port in container(objects, name)["ports"]}
    assert {"metrics", "dashboard", "serve", "agent"} <= named


def test_only_named_clients_and_scrapers_where_they_are_named() -> None:
    (door,) = [
        rule
        for rule in rules(render(AIRGAPPED), "front-door", "ingress")
        if {"port": "serve", "protocol": "TCP"} in rule.get("ports", [])
    ]
    spaces = [
        peer["namespaceSelector"]["matchLabels"]["kubernetes.io/metadata.name"]
        for peer in door["from"]
    ]
    assert spaces == ["gateway", "monitoring"]


@pytest.mark.parametrize("scraped", [False, True])
def test_named_clients_are_not_joined_by_everybody(scraped: bool) -> None:
    """Any namespace may scrape unless scrapers are named; at a front door that is any request."""
    client = {"ipBlock": {"cidr": "10.0.0.0/8"}}
    policy = {"networkPolicy.clients": [client], "metrics.serviceMonitor.enabled": scraped}
    (door,) = [
        rule
        for rule in rules(render(**policy), "front-door", "ingress")
        if {"port": "serve", "protocol": "TCP"} in rule.get("ports", [])
    ]
    assert door["from"] == [client, *([{"namespaceSelector": {}}] if scraped else [])]


@pytest.mark.parametrize("group", GROUPS)
def test_what_may_go_out(group: str) -> None:
    assert ports(rules(render(AIRGAPPED), group, "egress")) == {53}
    scaled = {443, 6443} if group == "head" else {443}  # the API server; the object store
    assert ports(rules(render(AUTOSCALING), group, "egress")) == {53} | scaled


# --- the model ----------------------------------------------------------------------------------


def model_volume(objects: Objects, group: str = "experts") -> dict[str, Any]:
    (volume,) = [v for v in pod(objects, group)["volumes"] if v["name"] == "model"]
    volume.pop("name")
    return dict(volume)


def test_a_claim_that_is_made() -> None:
    made = {"source": "pvc", "pvc.create": True}
    values = {f"model.{key}": value for key, value in made.items()}
    objects = render(**values)
    claim = the(objects, "PersistentVolumeClaim")
    assert "storageClassName" not in claim["spec"]
    assert claim["metadata"]["annotations"] == {"helm.sh/resource-policy": "keep"}
    name = claim["metadata"]["name"]
    assert model_volume(objects) == {"persistentVolumeClaim": {"claimName": name, "readOnly": True}}
    none = render(**values, **{"model.pvc.storageClass": "-", "model.pvc.keep": False})
    assert the(none, "PersistentVolumeClaim")["spec"]["storageClassName"] == ""
    assert "annotations" not in the(none, "PersistentVolumeClaim")["metadata"]


def test_every_pod_reads_the_same_folder() -> None:
    objects = render(AIRGAPPED)
    assert model_volume(objects) == {"hostPath": {"path": "/srv/models", "type": "Directory"}}
    for name in GROUPS:
        (mount,) = [m for m in container(objects, name)["volumeMounts"] if m["name"] == "model"]
        assert mount["readOnly"] is True
        assert app_arguments(objects)["mesh"]["load"]["model"].startswith(mount["mountPath"] + "/")


def test_caches_of_an_object_store() -> None:
    store = {"model.source": "objectStore", "model.objectStore.uri": "s3:b/m"}
    assert model_volume(render(**store)) == {"emptyDir": {"sizeLimit": "1Ti"}}
    kept = {
        "model.objectStore.cache.type": "hostPath",
        "model.objectStore.cache.hostPath": "/mnt/nvme",
    }
    assert model_volume(render(**store, **kept)) == {
        "hostPath": {"path": "/mnt/nvme", "type": "DirectoryOrCreate"}
    }
    template = model_volume(render(AUTOSCALING))["ephemeral"]["volumeClaimTemplate"]["spec"]
    assert template["storageClassName"] == "fast"
