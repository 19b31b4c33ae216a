"""Losing workers of a real mesh in mid-step: no request fails, no bit of an answer changes."""

import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest
import ray

from expertmesh.actors.attention.actor import replica_stats
from expertmesh.actors.state.settings import StateSettings
from expertmesh.cluster.launch import Mesh, start
from expertmesh.cluster.membership import Worker
from expertmesh.cluster.settings import RecoverySettings
from tests.support.local_ray import cluster
from tests.system.test_mesh import ENGINE, Reader, ask, model, one_process, settings, submit

__all__ = ["cluster", "model"]  # fixtures

TOKENS = 120
REQUESTS = [ask(f"r{i}", i, TOKENS) for i in range(6)]


@pytest.fixture(scope="module")
def want(model: Path) -> dict[str, list[int]]:
    return one_process(model, 1, REQUESTS)


def kill(mesh: Mesh, worker: Worker) -> None:
    os.kill(worker.member.pid, signal.SIGKILL)


def stop(mesh: Mesh, worker: Worker) -> None:
    os.kill(worker.member.pid, signal.SIGSTOP)


def hang_up(mesh: Mesh, worker: Worker) -> None:
    """Its sockets of the epoch close while the process lives on."""
    worker.handle.retire.remote(mesh.epoch.number + 1)


def stream_all(mesh: Mesh) -> list[Reader]:
    """One reader per replica, the requests shared out, tokens of each on their way."""
    readers = [Reader(actor, "door") for actor in mesh.attention]
    for i, request in enumerate(REQUESTS):
        assert submit(mesh.attention[i % len(readers)], "door", request) == [None]
    for reader in readers:
        reader.wait(lambda r: sum(map(len, r.tokens.values())) > 10)
    return readers


def finish(readers: list[Reader]) -> dict[str, list[int]]:
    got: dict[str, list[int]] = {}
    for i, reader in enumerate(readers):
        mine = len(REQUESTS[i :: len(readers)])
        reader.wait(lambda r, mine=mine: len(r.ends) == mine, 60)
        assert {end.finish_reason for end in reader.ends.values()} == {"length"}
        got |= reader.tokens
    return got


@pytest.fixture(scope="module")
def mesh(model: Path) -> Iterator[Mesh]:
    """Which has replaced what an earlier test took from it."""
    name = f"t{os.getpid()}-shared"
    mesh = start(settings(model, name=name, attention_replicas=2, expert_actors=3))
    yield mesh
    mesh.stop()


@pytest.mark.parametrize("harm", [kill, stop, hang_up])
def test_a_lost_expert_actor_costs_a_moment_and_no_token(
    mesh: Mesh, want: dict[str, list[int]], harm: Callable[[Mesh, Worker], None]
) -> None:
    counts, epoch = mesh.controller.counts, mesh.epoch.number
    losses, joins = counts.losses, counts.joins
    readers = stream_all(mesh)
    victim, began = mesh.controller.mesh.ranks.workers[1], time.monotonic()
    harm(mesh, victim)
    mesh.wait_state("recovering", timeout=10)
    noticed = time.monotonic() - began
    assert mesh.wait_state("ready", timeout=10).state == "ready"
    print(f"noticed {noticed:.2f} s, ready {time.monotonic() - began:.2f} s")
    assert finish(readers) == want
    assert mesh.epoch.number > epoch
    if harm is hang_up:
        assert counts.losses == losses
        assert victim in mesh.controller.mesh.ranks.workers
        return
    end = time.monotonic() + 60
    while counts.joins == joins:
        assert time.monotonic() < end, "nobody took the seat"
        time.sleep(0.05)
    replacement = next(w for w in mesh.controller.mesh.workers if w.seat == victim.seat)
    assert replacement.member.pid != victim.member.pid


def test_a_lost_replica_costs_at_most_a_checkpoint(model: Path, tmp_path: Path) -> None:
    """Another replica goes on from what the lost one has left on the disk that they share."""
    state = StateSettings(disk=tmp_path / "state", disk_bytes=256 << 20)
    engine = ENGINE.model_copy(update={"state": state})
    request = msgspec.structs.replace(
        ask("long", 1, 500), prompt_ids=[(i * i) % 300 + 1 for i in range(900)]
    )
    mesh = start(settings(model, attention_replicas=2, expert_actors=0, engine=engine))
    try:
        first, second = mesh.controller.mesh.attention
        reader = Reader(first.handle, "door")
        assert submit(first.handle, "door", request) == [None]
        reader.wait(lambda r: len(r.tokens.get("long", ())) > 350, 60)
        kill(mesh, first)
        reader.wait(lambda r: r.lost is not None)
        received = reader.tokens["long"]
        heir = Reader(second.handle, "door")
        resumed = msgspec.structs.replace(request, resume_ids=list(received))
        assert submit(second.handle, "door", resumed) == [None]
        heir.wait(lambda r: "long" in r.ends, 60)
        stats = replica_stats(ray.get(second.handle.stats.remote())).engine
    finally:
        mesh.stop()
    assert received + heir.tokens["long"] == one_process(model, 1, [request])["long"]
    assert 0 < stats.recomputed_tokens <= state.checkpoint_tokens
    assert stats.cache.loads_failed == 0


def test_what_nobody_can_hold_is_said_and_waited_for(
    model: Path, want: dict[str, list[int]]
) -> None:
    """3 actors with 3 slots hold 7 experts, two do not."""
    mesh = start(
        settings(
            model,
            expert_actors=3,
            slots_per_actor=3,
            recovery=RecoverySettings(hold_s=120.0),
        )
    )
    try:
        readers = stream_all(mesh)
        kill(mesh, mesh.controller.mesh.ranks.workers[2])
        state = mesh.wait_state("unserviceable", timeout=10)
        assert "1 of 7 experts per layer have no room" in state.reason
        directory = mesh.directory(-1, 0)
        assert not directory.serving and directory.reason == state.reason
        assert mesh.wait_state("ready", timeout=60).state == "ready"
        assert mesh.directory(-1, 0).serving
        assert finish(readers) == want
    finally:
        mesh.stop()


def test_requests_that_waited_too_long_fail_and_the_next_ones_are_served(
    model: Path, want: dict[str, list[int]]
) -> None:
    mesh = start(
        settings(
            model,
            expert_actors=1,
            recovery=RecoverySettings(hold_s=0.3, grace_s=0.1),
        )
    )
    try:
        (reader,) = stream_all(mesh)
        kill(mesh, mesh.controller.mesh.ranks.workers[0])
        reader.wait(lambda r: len(r.ends) == len(REQUESTS), 20)
        assert {end.finish_reason for end in reader.ends.values()} == {"error"}
        assert all("no new epoch within" in (end.error or "") for end in reader.ends.values())
        assert mesh.wait_state("ready", timeout=60).state == "ready"
        (reader,) = stream_all(mesh)
        assert finish([reader]) == want
    finally:
        mesh.stop()
