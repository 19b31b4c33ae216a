"""What /metrics shows of a mesh: right types, bounded series, nothing stale, nothing hidden."""

import math
import re
from collections.abc import Iterator

import pytest
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from expertmesh.cluster import metrics
from expertmesh.cluster.ledger.stats import ActorLoad, MeshStats, ReplicaLoad, RoutingStats
from expertmesh.deploy.openai.telemetry import Telemetry


@pytest.fixture
def telemetry() -> Telemetry:
    return Telemetry("nano", lambda: 0.0)


def text(telemetry: Telemetry, mesh: MeshStats | None) -> str:
    return telemetry.exposition({}, mesh).decode()


def samples(telemetry: Telemetry, mesh: MeshStats | None) -> Iterator[Sample]:
    """Of the mesh only."""
    names = {metric.full_name for metric in metrics.MESH}
    for family in text_string_to_metric_families(text(telemetry, mesh)):
        if family.name in names:
            yield from family.samples


def values(telemetry: Telemetry, mesh: MeshStats | None, name: str) -> dict[str, float]:
    """By the label besides the model's name."""
    return {
        "".join(value for label, value in one.labels.items() if label != "model_name"): one.value
        for one in samples(telemetry, mesh)
        if one.name == f"expertmesh_{name}"
    }


def mesh(seats: int = 2, **fields: object) -> MeshStats:
    return MeshStats(
        epoch=3,
        actors=[ActorLoad(f"expert-{i}", 100 + i, 1.5) for i in range(seats)],
        replicas=[ReplicaLoad("attention-0", 330, 100, 0.25, 0.5)],
        **fields,  # type: ignore[arg-type]
    )


def test_every_metric_is_exposed_with_its_type_and_labels(telemetry: Telemetry) -> None:
    routing = RoutingStats(0.6, 0.8, 0.9, 1, {"dead_expert": 2}, {"dead_expert": 1})
    stats = mesh(
        rebalances={"done": 4}, last_rebalance=1.75e9, moved_bytes=7, routing=routing,
        last_recovery=0.4, members={"attention": 1, "expert": 2},
        desired={"attention": 1, "expert": 3},
    )  # fmt: skip
    exposition = text(telemetry, stats)
    found = list(samples(telemetry, stats))
    for metric in metrics.MESH:
        suffix = "_total" if metric.kind == "counter" else ""
        assert f"# TYPE {metric.full_name}{suffix} {metric.kind}" in exposition
        mine = [one for one in found if one.name == metric.full_name + suffix]
        assert mine, metric.name
        assert all(set(one.labels) == set(metric.labels) for one in mine), metric.name
    assert all(one.labels["model_name"] == "nano" for one in found)
    assert values(telemetry, stats, "expert_rows_total") == {"expert-0": 100, "expert-1": 101}
    assert values(telemetry, stats, "moe_dispatched_rows_total") == {"attention-0": 330}
    assert values(telemetry, stats, "expert_load_balancedness") == {"worst": 0.6, "mean": 0.8}
    assert values(telemetry, stats, "mesh_rebalances_total") == {"done": 4, "failed": 0}
    assert values(telemetry, stats, "routing_alarms_total")["dead_expert"] == 2
    assert values(telemetry, stats, "routing_alarms_active")["router_nonfinite"] == 0
    assert values(telemetry, stats, "mesh_desired_members") == {"attention": 1, "expert": 3}
    states = values(telemetry, stats, "mesh_state")
    assert states["ready"] == 1 and sum(states.values()) == 1


def test_names_say_unit_and_kind() -> None:
    """What `promtool check metrics` looks for."""
    for metric in metrics.ALL:
        assert re.fullmatch(r"expertmesh_[a-z0-9_]+", metric.full_name)
        assert not metric.name.endswith(("_total", "_count", "_sum", "_bucket"))
        assert not re.search(r"_(ms|milliseconds|kb|mb|gb|percent|minutes)(_|$)", metric.name)
        assert metric.help.endswith(".")
        if "seconds" in metric.name:
            assert metric.name.endswith("_seconds")
        if metric.kind == "counter":
            assert not metric.name.endswith(("_perc", "_ratio", "_min", "timestamp_seconds"))


def test_without_load_or_mesh_there_is_no_nan_and_no_made_up_number(telemetry: Telemetry) -> None:
    assert list(samples(telemetry, None)) == []
    found = list(samples(telemetry, MeshStats()))
    assert all(math.isfinite(one.value) for one in found)
    names = {one.name for one in found}
    assert not names & {
        "expertmesh_expert_load_balancedness",
        "expertmesh_routing_entropy_min",
        "expertmesh_mesh_last_rebalance_timestamp_seconds",
        "expertmesh_mesh_last_recovery_seconds",
    }
    assert "expertmesh_mesh_failovers_total" in names, "a counter shows its zero"


def test_series_stay_bounded_over_a_thousand_replacements(telemetry: Telemetry) -> None:
    """Actors die and are replaced in their seats; the pool grows and shrinks again."""
    first = {(one.name, *sorted(one.labels.items())) for one in samples(telemetry, mesh(4))}
    sizes = []
    for life in range(1000):
        stats = mesh(4 + life % 3, failovers=life)
        stats.epoch = life
        found = {(one.name, *sorted(one.labels.items())) for one in samples(telemetry, stats)}
        sizes.append(len(found))
    assert max(sizes) == len(first) + 2 * 5, "five series for each further seat"
    last = {(one.name, *sorted(one.labels.items())) for one in samples(telemetry, mesh(4))}
    assert last == first


def test_a_seat_that_left_is_gone_and_none_hides_another(telemetry: Telemetry) -> None:
    assert list(values(telemetry, mesh(3), "expert_rows_total")) == [
        "expert-0", "expert-1", "expert-2",
    ]  # fmt: skip
    stats = mesh(3)
    stats.actors[1] = ActorLoad("expert-1", up=False)
    assert list(values(telemetry, stats, "expert_up").values()) == [1, 0, 1]
    assert list(values(telemetry, stats, "expert_rows_total")) == ["expert-0", "expert-2"]
    del stats.actors[1]
    assert list(values(telemetry, stats, "expert_up")) == ["expert-0", "expert-2"]
    assert list(values(telemetry, stats, "expert_rows_total")) == ["expert-0", "expert-2"]
    assert list(samples(telemetry, None)) == [], "nothing stale when the keeper is silent"
