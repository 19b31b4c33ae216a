"""The failure state machine over made-up workers: losses, arrivals, wishes, in any order."""

import random
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from expertmesh.cluster.directory import ScaleError
from expertmesh.cluster.events import Drained, EpochBroken, Joined
from expertmesh.cluster.placement import Placement
from expertmesh.cluster.settings import RecoverySettings
from expertmesh.cluster.worker_pool import WorkerError
from tests.support.fake_workers import FakeMesh

QUICK = RecoverySettings(grace_s=0.05)


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    made: list[FakeMesh] = []

    def start(**settings: Any) -> FakeMesh:
        made.append(FakeMesh(monkeypatch, **settings))
        return made[-1]

    yield start
    for mesh in made:
        mesh.controller.stop()


def state(mesh: FakeMesh) -> str:
    return mesh.controller.status.state


def test_a_lost_expert_actor_is_absorbed_by_the_others_and_replaced(make: Any) -> None:
    mesh = make()
    victim = mesh.mesh.ranks.workers[1]
    mesh.kill(victim)
    mesh.settle(lambda: mesh.mesh.epoch.number == 1)
    mesh.check()
    assert state(mesh) == "ready" and mesh.mesh.reloaded == 6  # 3 experts of each of 2 layers
    assert victim in mesh.pool.ended
    assert [(kind, seat) for kind, seat, _, _ in mesh.provisioner.wanted] == [
        ("expert", "expert-1")
    ]
    assert mesh.provisioner.wanted[0][2] is victim.bundle
    newcomer = mesh.provisioner.arrive()
    mesh.settle(lambda: mesh.mesh.epoch.number == 2)
    mesh.check()
    assert newcomer in mesh.mesh.ranks.workers and newcomer.seat == "expert-1"


def test_too_few_slots_say_so_and_serve_again_when_somebody_comes(make: Any) -> None:
    mesh = make(slots_per_actor=4, recovery=QUICK)
    mesh.kill(*mesh.mesh.ranks.workers[1:])
    mesh.settle(lambda: state(mesh) == "unserviceable")
    directory = mesh.controller.directory(-1, 0)
    assert not directory.serving and "4 of 8 experts per layer have no room" in directory.reason
    assert "was killed" in directory.reason
    mesh.provisioner.arrive()
    mesh.settle(lambda: state(mesh) == "ready")
    mesh.check()
    assert mesh.controller.directory(-1, 0).serving


def test_all_expert_actors_at_once_come_back_with_different_shares(make: Any) -> None:
    mesh = make(recovery=QUICK)
    mesh.kill(*mesh.mesh.ranks.workers)
    mesh.settle(lambda: len(mesh.provisioner.wanted) == 3)
    assert state(mesh) == "unserviceable"
    for _ in range(3):
        mesh.provisioner.arrive()
    mesh.settle(lambda: state(mesh) == "ready" and len(mesh.mesh.ranks.workers) == 3)
    mesh.check()


def test_without_attention_nothing_serves_until_one_is_back(make: Any) -> None:
    mesh = make(attention=1, recovery=QUICK)
    mesh.kill(mesh.mesh.attention[0])
    mesh.settle(lambda: state(mesh) == "unserviceable")
    assert mesh.controller.directory(-1, 0).replicas == ()
    worker = mesh.provisioner.arrive()
    mesh.settle(lambda: state(mesh) == "ready")
    mesh.check()
    assert mesh.controller.directory(-1, 0).replicas == (("attention-0", worker.member.name),)


def test_a_recovery_is_green_for_its_grace_and_red_after_it(make: Any) -> None:
    mesh = make(recovery=QUICK)
    mesh.controller._state.enter("recovering", "expert-1 has died")
    assert mesh.controller.directory(-1, 0).serving
    seen = mesh.controller.directory(-1, 0).version
    red = mesh.controller.directory(seen, 5.0)
    assert not red.serving and red.reason == "expert-1 has died"


def test_a_broken_epoch_of_living_workers_is_made_again(make: Any) -> None:
    mesh = make()
    members = mesh.mesh.epoch.members
    mesh.post(EpochBroken(0, "connection closed by peer"))
    mesh.settle(lambda: mesh.mesh.epoch.number == 1)
    mesh.check()
    assert mesh.mesh.epoch.members == members and mesh.controller.counts.losses == 0
    mesh.post(EpochBroken(0, "old news"))
    mesh.settle()
    assert mesh.mesh.epoch.number == 1


def test_epochs_that_keep_breaking_end_the_requests_in_them(make: Any) -> None:
    mesh = make()
    for number in range(4):
        assert all(worker.handle.given_up == [] for worker in mesh.mesh.attention)
        mesh.post(EpochBroken(number, "expert 1: ValueError"))
        mesh.settle(lambda number=number: mesh.mesh.epoch.number == number + 1)
    for worker in mesh.mesh.attention:
        (reason,) = worker.handle.given_up
        assert "4 epochs in a row" in reason and "expert 1: ValueError" in reason
    mesh.check()


def test_a_join_that_fails_leaves_the_old_epoch_serving(make: Any) -> None:
    mesh = make()
    mesh.controller.scale(experts=4, attention=None)
    mesh.settle(lambda: len(mesh.provisioner.wanted) == 1)
    worker = mesh.provisioner.arrive()
    worker.handle.dead = True  # it loaded, then died before it could meet the others
    mesh.settle(lambda: mesh.controller.counts.failed_joins == 1)
    assert state(mesh) == "ready" and mesh.mesh.epoch.number == 0
    assert mesh.controller.desired()["expert"] == 3
    assert worker in mesh.pool.ended and worker.bundle.group not in mesh.pool.bundles
    mesh.settle(lambda: mesh.provisioner.wanted == [])
    mesh.check()


def test_a_seat_that_cannot_be_filled_is_left_until_somebody_asks(make: Any) -> None:
    mesh = make()
    mesh.kill(mesh.mesh.ranks.workers[0])
    mesh.settle(lambda: len(mesh.provisioner.wanted) == 1)
    assert mesh.provisioner.wanted[0][3] == 6  # one attempt and five restarts
    mesh.provisioner.fail()
    mesh.settle(lambda: mesh.controller.counts.failed_joins == 1)
    mesh.settle()
    assert mesh.provisioner.wanted == [] and state(mesh) == "ready"
    mesh.controller.scale(experts=3, attention=None)
    mesh.settle(lambda: len(mesh.provisioner.wanted) == 1)


def test_a_seat_that_was_given_up_is_tried_again_after_a_rest(make: Any) -> None:
    mesh = make(recovery=RecoverySettings(rest_s=0.05))
    mesh.kill(mesh.mesh.ranks.workers[0])
    mesh.settle(lambda: len(mesh.provisioner.wanted) == 1)
    mesh.provisioner.fail()
    mesh.settle(lambda: mesh.controller.counts.failed_joins == 1)
    mesh.settle(lambda: len(mesh.provisioner.wanted) == 1)
    mesh.provisioner.arrive()
    mesh.settle(lambda: mesh.controller.counts.joins == 1)
    mesh.check()


def test_scaling_down_waits_for_the_copies_and_gives_the_place_back(make: Any) -> None:
    mesh = make()
    mesh.controller.scale(experts=2, attention=1)
    mesh.settle(lambda: len(mesh.controller.leaving()) == 2)
    replica = mesh.provisioner.draining[0]
    assert [seat for seat, _ in mesh.controller.directory(-1, 0).replicas] == ["attention-0"]
    mesh.post(Drained(replica))
    mesh.settle(lambda: mesh.mesh.epoch.number == 1)
    leaving = mesh.mesh.ranks.workers[-1]
    held = {
        layer: (actors[0] + actors[2], actors[1], ())
        for layer, actors in mesh.mesh.ranks.placement.held.items()
    }
    first = mesh.mesh.ranks.workers[0]
    for layer, actors in held.items():
        first.handle.held[layer] = set(actors[0])
    assert mesh.controller.flip(1, Placement(held))
    mesh.post(Drained(leaving))
    mesh.settle(lambda: mesh.mesh.epoch.number == 2)
    mesh.check()
    assert leaving in mesh.pool.ended and leaving.bundle.group not in mesh.pool.bundles


def test_a_rank_that_does_not_flip_gets_a_new_epoch(make: Any) -> None:
    mesh = make()
    placement = mesh.mesh.ranks.placement
    mesh.mesh.attention[1].handle.deaf = True
    assert not mesh.controller.flip(0, placement)
    mesh.settle(lambda: mesh.mesh.epoch.number == 1)
    mesh.check()


def test_a_flip_for_another_epoch_changes_nothing(make: Any) -> None:
    mesh = make()
    assert not mesh.controller.flip(7, Placement({}))
    mesh.check()


def test_wishes_that_cannot_be_met_are_refused_with_the_field(make: Any) -> None:
    mesh = make(slots_per_actor=4)
    for experts, attention, field, text in (
        (1, None, "experts", "8 experts per layer fit 2 to 8 actors"),
        (9, None, "experts", "fit 2 to 8 actors"),
        (None, 0, "attention", "at least 1 replica"),
        (None, 1001, "attention", "at most 1000 replicas"),
    ):
        with pytest.raises(ScaleError, match=text) as caught:
            mesh.controller.scale(experts, attention)
        assert caught.value.field == field
    mesh.controller.scale(experts=5, attention=None, dry_run=True)
    mesh.settle()
    assert mesh.controller.desired()["expert"] == 3


def test_a_newcomer_that_does_not_move_does_not_take_the_others_with_it(make: Any) -> None:
    mesh = make()
    mesh.controller.scale(experts=None, attention=3)
    mesh.settle(lambda: len(mesh.provisioner.wanted) == 1)
    kind, seat, bundle, _ = mesh.provisioner.wanted.pop()
    worker = mesh.make(kind, seat, {}, bundle)
    worker.handle.stays = True
    mesh.post(Joined(worker))
    mesh.settle(lambda: mesh.controller.counts.failed_joins == 1 and state(mesh) == "ready")
    mesh.check()  # the others had left epoch 0: they need another one
    assert mesh.mesh.epoch.number == 2 and mesh.controller.desired()["attention"] == 2


def test_who_does_not_move_a_second_time_is_lost(make: Any) -> None:
    mesh = make()
    first, second = mesh.mesh.attention
    second.handle.stays = True
    mesh.post(EpochBroken(0, "connection closed by peer"))
    mesh.settle(lambda: mesh.mesh.attention == [first] and state(mesh) == "ready")
    mesh.check()
    assert second in mesh.pool.ended
    assert [seat for _, seat, _, _ in mesh.provisioner.wanted] == ["attention-1"]


@pytest.mark.parametrize(("kind", "here"), [("attention", 1), ("expert", 2)])
def test_a_wish_taken_back_is_not_taken_back_again_when_it_fails(
    make: Any, kind: str, here: int
) -> None:
    mesh = make(attention=1, experts=2)
    argument = "attention" if kind == "attention" else "experts"
    for wanted in (here + 2, here):
        mesh.controller.scale(**{"experts": None, "attention": None, argument: wanted})
        mesh.settle(lambda: len(mesh.provisioner.wanted) == 2)
    mesh.provisioner.fail()
    mesh.provisioner.fail()
    mesh.settle(lambda: mesh.controller.counts.failed_joins == 2)
    assert mesh.controller.desired()[kind] == here
    assert not mesh.controller.leaving() and not mesh.provisioner.wanted


def test_a_loss_while_experts_are_read_again_leaves_nothing_believed_that_is_gone(
    make: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    mesh = make(slots_per_actor=4, experts=4)
    held = dict.fromkeys((1, 2), ((0, 1, 2, 3), (4, 5, 2, 3), (6, 7, 0, 1), (4, 5, 0, 1)))
    for rank, worker in enumerate(mesh.mesh.ranks.workers):
        worker.handle.held = {layer: set(actors[rank]) for layer, actors in held.items()}
        worker.held = {layer: actors[rank] for layer, actors in held.items()}
    assert mesh.controller.flip(0, Placement(held))
    ask, (_, _, third, fourth) = mesh.pool.ask, tuple(mesh.mesh.ranks.workers)

    def interrupted(workers: Any, calls: Any, what: str, limit: float) -> Any:
        if what == "load more" and not fourth.handle.dead:
            mesh.kill(fourth)  # copies have made room by now, some of them had their other one here
            raise WorkerError("dead")
        return ask(workers, calls, what, limit)

    monkeypatch.setattr(mesh.pool, "ask", interrupted)
    mesh.kill(third)
    mesh.settle(lambda: state(mesh) == "ready" and len(mesh.mesh.ranks.workers) == 2)
    mesh.check()
    for rank, worker in enumerate(mesh.mesh.ranks.workers):
        placed = mesh.mesh.ranks.placement.of_actor(rank)
        assert worker.handle.held == {layer: set(ids) for layer, ids in placed.items()}


def test_a_place_that_cannot_be_freed_is_used_again(make: Any) -> None:
    mesh = make()
    leaving = mesh.mesh.attention[1]
    mesh.pool.shared.add(leaving.bundle.group)
    mesh.controller.scale(experts=None, attention=1)
    mesh.settle(lambda: mesh.provisioner.draining == [leaving])
    mesh.post(Drained(leaving))
    mesh.settle(lambda: mesh.mesh.epoch.number == 1)
    mesh.controller.scale(experts=None, attention=2)
    mesh.settle(lambda: len(mesh.provisioner.wanted) == 1)
    assert mesh.provisioner.wanted[0] == ("attention", "attention-1", leaving.bundle, 1)


def test_a_departure_that_cannot_be_finished_leaves_the_old_epoch_serving(
    make: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    mesh = make()
    mesh.controller.scale(experts=None, attention=1)
    mesh.settle(lambda: len(mesh.provisioner.draining) == 1)

    def refuse(*arguments: Any) -> None:
        raise WorkerError("not all have come")

    with monkeypatch.context() as patch:
        patch.setattr(mesh.mesh, "_form", refuse)
        mesh.post(Drained(mesh.provisioner.draining[0]))
        mesh.settle(lambda: len(mesh.mesh.attention) == 1)
        assert state(mesh) == "ready" and mesh.mesh.epoch.number == 0
        assert mesh.controller.directory(-1, 0).serving
        assert mesh.provisioner.draining[0] not in mesh.pool.ended
    mesh.settle(lambda: mesh.mesh.epoch.number == 1)
    mesh.check()


def test_who_was_to_leave_stays_when_another_is_lost(make: Any) -> None:
    mesh = make(slots_per_actor=4)
    mesh.controller.scale(experts=2, attention=None)
    mesh.settle(lambda: len(mesh.controller.leaving()) == 1)
    (leaving,) = mesh.controller.leaving()
    mesh.kill(mesh.mesh.ranks.workers[0])
    mesh.post(Drained(leaving))
    mesh.settle(lambda: mesh.mesh.epoch.number == 1)
    mesh.check()
    assert state(mesh) == "ready" and leaving in mesh.mesh.ranks.workers
    assert not mesh.controller.leaving() and not mesh.provisioner.wanted


def test_a_wish_for_fewer_with_more_slots_each_serves_again(make: Any) -> None:
    mesh = make(experts=4, recovery=QUICK)
    mesh.kill(*mesh.mesh.ranks.workers[2:])
    mesh.settle(lambda: state(mesh) == "unserviceable")
    mesh.controller.scale(experts=2, attention=None)
    mesh.settle(lambda: state(mesh) == "ready")
    mesh.check()


def test_an_unreadable_checkpoint_is_the_reason_that_is_told(make: Any) -> None:
    mesh = make(recovery=QUICK)
    survivors = mesh.mesh.ranks.workers[1:]
    for worker in survivors:
        worker.handle.unread = 12
    mesh.kill(mesh.mesh.ranks.workers[0])
    mesh.settle(lambda: survivors[0].handle.unread < 7)
    told = mesh.controller.directory(-1, 0).reason
    assert "the shard cannot be read" in told and told.count("do not come together") == 1
    mesh.settle(lambda: state(mesh) == "ready")
    mesh.check()


def test_who_falls_silent_while_waited_for_is_ended_at_once(
    make: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    mesh = make(slots_per_actor=8)
    ask, frozen = mesh.pool.ask, mesh.mesh.ranks.workers[2]
    waiting, ended = threading.Event(), threading.Event()
    end = mesh.pool.end

    def wait(workers: Any, calls: Any, what: str, limit: float) -> Any:
        if what == "load more" and not ended.is_set():
            waiting.set()
            assert ended.wait(10.0), "the process that is waited for has not been ended"
            raise WorkerError("dead")
        return ask(workers, calls, what, limit)

    def noted(workers: Any) -> None:
        end(workers)
        if frozen in workers:
            ended.set()

    monkeypatch.setattr(mesh.pool, "ask", wait)
    monkeypatch.setattr(mesh.pool, "end", noted)
    mesh.kill(mesh.mesh.ranks.workers[0])
    assert waiting.wait(10.0)
    mesh.controller._report(frozen, "does not answer")
    mesh.settle(lambda: state(mesh) == "ready" and frozen not in mesh.mesh.ranks.workers)
    mesh.check()
    assert mesh.pool.ended.count(frozen) == 1


@pytest.mark.parametrize("seed", range(6))
def test_any_order_of_events_ends_in_a_mesh_that_serves(make: Any, seed: int) -> None:
    draw = random.Random(seed)
    mesh = make(recovery=QUICK, slots_per_actor=draw.choice([None, 4, 8]))

    def kill() -> None:
        mesh.kill(
            *draw.sample(mesh.mesh.workers, min(len(mesh.mesh.workers), draw.choice([1, 1, 2])))
        )

    def arrive() -> None:
        if mesh.provisioner.wanted:
            worker = mesh.provisioner.arrive(draw.randrange(len(mesh.provisioner.wanted)))
            worker.handle.dead = draw.random() < 0.2

    def fail() -> None:
        if mesh.provisioner.wanted:
            mesh.provisioner.fail(draw.randrange(len(mesh.provisioner.wanted)))

    def scale() -> None:
        mesh.controller.scale(draw.randint(3, 6), draw.randint(1, 3))

    def drain() -> None:
        for worker in mesh.controller.leaving():
            if worker.kind == "attention":
                mesh.post(Drained(worker))

    def tear() -> None:
        mesh.post(EpochBroken(mesh.mesh.epoch.number, "made up"))

    for _ in range(60):
        draw.choice([kill, arrive, arrive, arrive, fail, scale, drain, tear])()
        if draw.random() < 0.7:
            mesh.settle()
            mesh.check()
    for _ in range(40):  # from here on everything succeeds
        mesh.controller.scale(4, 2)
        mesh.settle()
        drain()
        while mesh.provisioner.wanted:
            mesh.provisioner.arrive()
        mesh.settle()
        if state(mesh) == "ready" and len(mesh.mesh.ranks.workers) >= 4:
            break
    mesh.settle(lambda: state(mesh) == "ready")
    mesh.check()
    assert len(mesh.mesh.ranks.workers) >= 4 and mesh.mesh.attention
    assert not any(worker.handle.dead for worker in mesh.mesh.workers)


def test_after_growing_and_shrinking_any_one_actor_can_be_lost_again(make: Any) -> None:
    mesh = make(of=16)
    assert mesh.mesh.slots == 8
    mesh.controller.scale(experts=4, attention=None)
    mesh.settle(lambda: len(mesh.provisioner.wanted) == 1)
    mesh.provisioner.arrive()
    mesh.settle(lambda: mesh.mesh.slots == 6)
    mesh.controller.scale(experts=3, attention=None)
    mesh.settle(lambda: mesh.mesh.slots == 8 and len(mesh.controller.leaving()) == 1)
    mesh.controller.scale(experts=2, attention=None)
    mesh.settle(lambda: mesh.mesh.slots == 16)


def test_a_recovery_is_timed_from_the_loss_on(make: Any) -> None:
    mesh = make(attention=1, recovery=QUICK)
    mesh.kill(mesh.mesh.attention[0])
    mesh.settle(lambda: state(mesh) == "unserviceable")
    time.sleep(0.2)
    mesh.provisioner.arrive()
    mesh.settle(lambda: state(mesh) == "ready")
    assert mesh.controller.counts.recovery_s >= 0.2


def test_the_reason_names_all_that_the_trouble_came_of(make: Any) -> None:
    mesh = make(attention=1, recovery=QUICK)
    replica, actor = mesh.mesh.attention[0], mesh.mesh.ranks.workers[0]
    mesh.kill(replica, actor)
    mesh.settle(lambda: state(mesh) == "unserviceable" and len(mesh.provisioner.wanted) == 2)
    reason = mesh.controller.status.reason
    assert replica.member.name in reason and actor.member.name in reason
