"""A mesh without processes: the control plane runs for real, its workers are made up.

A worker keeps what it was told to hold and which epochs it met; a dead one fails every call.
"""

import itertools
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from expertmesh.actors.exchange.roster import Routing
from expertmesh.actors.model.loading import LoadSettings
from expertmesh.cluster.assembly import Assembly
from expertmesh.cluster.controller import Controller
from expertmesh.cluster.events import AttemptFailed, Event, Joined, NotJoined, WorkerLost
from expertmesh.cluster.membership import Bundle, Kind, Member, Worker
from expertmesh.cluster.placement import contiguous_placement
from expertmesh.cluster.ranks import ExpertRanks, Share
from expertmesh.cluster.settings import ClusterSettings
from expertmesh.cluster.worker_pool import WorkerError

Call = Callable[[], Any]


class FakeHandle:
    """An actor's methods, carried out at once; the answer or error comes when it is asked for."""

    def __init__(self) -> None:
        self.dead = False
        self.deaf = False  # alive, but takes no new routing
        self.stays = False  # alive, but does not move to another epoch
        self.unread = 0  # so many times its checkpoint cannot be read
        self.met: list[int] = []
        self.given_up: list[str] = []
        self.epoch = self.version = -1
        self.held: dict[int, set[int]] = {}
        self.adopted, self.adopts = 0, 10**9  # copies taken, and how many go well

    def __getattr__(self, name: str) -> Any:
        method = getattr(type(self), f"_{name}")

        class Remote:
            @staticmethod
            def remote(*arguments: Any) -> Call:
                if self.dead:
                    return partial(_failing, "dead")
                try:
                    answer = method(self, *arguments)
                except WorkerError as error:
                    return partial(_failing, str(error))
                return lambda: answer

        return Remote

    def _open_store(self, epoch: int) -> tuple[str, int]:
        return "store", epoch

    def _prepare(self, roster: Any, rank: int) -> None:
        self.met.append(-1 if roster is None else roster.epoch)
        if roster is not None:
            self._routing = roster.version

    def _discard(self, epoch: int) -> None:
        self.met = [one for one in self.met if one != epoch]

    def _switch(self, epoch: int) -> None:
        if self.stays:
            raise WorkerError("no memory for its pages")
        assert epoch in self.met and epoch > self.epoch
        self.epoch, self.version = epoch, self._routing

    def _retire(self, below: int) -> None:
        self.epoch = below

    def _give_up(self, reason: str) -> None:
        self.given_up.append(reason)

    def _abort_epoch(self, epoch: int, reason: str) -> None: ...

    def _route(self, routing: Routing) -> int:
        assert routing.version > self.version
        if not self.deaf:
            self.version = routing.version
        return self.version

    def _load_more(self, share: Share) -> None:
        if self.unread > 0:
            self.unread -= 1
            raise WorkerError("the shard cannot be read")
        for layer, ids in share.items():
            self.held.setdefault(layer, set()).update(ids)

    def _adopt(self, layer: int, expert: int, source: "FakeHandle", limit: float, name: str) -> int:
        if expert not in source.held.get(layer, set()):
            raise AssertionError(f"{name} does not hold expert {expert} of layer {layer}")
        self.adopted += 1
        if self.adopted > self.adopts:
            raise WorkerError("checksum mismatch")
        self.held.setdefault(layer, set()).add(expert)
        return 0

    def _drop(self, share: Share, version: int) -> None:
        for layer, ids in share.items():
            self.held[layer] -= set(ids)


def _failing(reason: str) -> Any:
    raise WorkerError(reason)


class FakePool:
    """What a WorkerPool does, without Ray."""

    def __init__(self) -> None:
        self.ended: list[Worker] = []
        self.bundles: set[str] = set()
        self.shared: set[str] = set()  # bundles of a group with others: they cannot be freed

    def ask(self, workers: Sequence[Worker], calls: list[Call], what: str, limit: float) -> Any:
        answers = []
        for worker, call in zip(workers, calls, strict=True):
            try:
                answers.append(call())
            except WorkerError as error:
                raise WorkerError(f"{worker.member.name} could not {what}: {error}") from error
        return answers

    def wait(self, calls: list[Call], timeout_s: float) -> None: ...

    def share(self, value: Any) -> Any:
        return value

    def end(self, workers: Sequence[Worker]) -> None:
        for worker in workers:
            worker.handle.dead = True
        self.ended += workers

    def give_back(self, bundle: Bundle) -> bool:
        if bundle.group in self.shared:
            return False
        self.bundles.discard(bundle.group)
        return True


class FakeWatch:
    def __init__(self, *arguments: Any) -> None:
        self.followed: list[Worker] = []

    def follow(self, workers: Sequence[Worker]) -> None:
        self.followed = list(workers)

    def stop(self) -> None: ...


class FakeProvisioner:
    """Seats that wait to be filled: the test says when, and whether it succeeds."""

    def __init__(self, world: "FakeMesh", share: Callable[[str], Share]) -> None:
        self._world, self._share = world, share
        self.wanted: list[tuple[Kind, str, Bundle | None, int]] = []
        self.draining: list[Worker] = []

    def fill(self, kind: Kind, seat: str, bundle: Bundle | None, attempts: int) -> None:
        self.wanted.append((kind, seat, bundle, attempts))

    def drain(self, worker: Worker, limit_s: float) -> None:
        self.draining.append(worker)

    def stop(self) -> None: ...

    def arrive(self, at: int = 0) -> Worker:
        kind, seat, bundle, _ = self.wanted.pop(at)
        share = self._share(seat) if kind == "expert" else {}
        worker = self._world.make(kind, seat, share, bundle)
        self._world.post(Joined(worker))
        return worker

    def fail(self, at: int = 0) -> None:
        kind, seat, _, _ = self.wanted.pop(at)
        self._world.post(AttemptFailed(seat, "made up"))
        self._world.post(NotJoined(kind, seat, "made up"))


class FakeMesh:
    """A controller over made-up workers. layers: 2, from 1 on."""

    def __init__(
        self, monkeypatch: Any, *, attention: int = 2, experts: int = 3, of: int = 8, **changes: Any
    ) -> None:
        self._serial = itertools.count()
        self.pool = FakePool()
        settings = ClusterSettings(
            **{
                "load": LoadSettings(model="/nowhere"),
                "attention_replicas": attention,
                "expert_actors": experts,
                **changes,
            }
        )
        for name, fake in (
            ("Watch", FakeWatch),
            ("Provisioner", lambda settings, pool, post, share: FakeProvisioner(self, share)),
            ("TICK_S", 0.001),
            ("RETRY_S", 0.02),
        ):
            monkeypatch.setattr(f"expertmesh.cluster.controller.{name}", fake)
        placement = contiguous_placement((1, 2), of, experts)
        replicas = [self.make("attention", f"attention-{i}") for i in range(attention)]
        actors = [self.make("expert", f"expert-{i}", placement.of_actor(i)) for i in range(experts)]
        ranks = ExpertRanks(of, placement, actors)
        pool: Any = self.pool
        self.mesh = Assembly(settings, pool, replicas, ranks)
        self.controller = Controller(settings, pool, self.mesh)
        provisioner: Any = self.controller._provisioner
        self.provisioner: FakeProvisioner = provisioner

    def make(
        self, kind: Kind, seat: str, share: Share | None = None, bundle: Bundle | None = None
    ) -> Worker:
        number = next(self._serial)
        handle = FakeHandle()
        handle.held = {layer: set(ids) for layer, ids in (share or {}).items()}
        member = Member(f"m-{seat}.{number}", 1000 + number, "host", "127.0.0.1")
        if bundle is None:
            bundle = Bundle(f"bundle of {seat}, {number}", 0)
            self.pool.bundles.add(bundle.group)
        return Worker(kind, seat, member, handle, bundle, "node", dict(share or {}))

    def post(self, event: Event) -> None:
        self.controller.post(event)

    def kill(self, *workers: Worker) -> None:
        for worker in workers:
            worker.handle.dead = True
        for worker in workers:
            self.post(WorkerLost(worker, "was killed"))

    def settle(self, condition: Callable[[], bool] = lambda: True, limit_s: float = 5.0) -> None:
        """Returns once the control thread has nothing to do and the condition holds."""
        end = time.monotonic() + limit_s
        while time.monotonic() < end:
            if self.controller._inbox.empty() and self.controller.lock.acquire(timeout=0.1):
                try:
                    if self.controller._inbox.empty() and condition():
                        return
                finally:
                    self.controller.lock.release()
            time.sleep(0.001)
        raise AssertionError(f"did not settle: {self.controller.status}")

    def check(self) -> None:
        """What must hold whenever the mesh says that it is ready."""
        if self.controller.status.state != "ready":
            return
        epoch, ranks = self.mesh.epoch, self.mesh.ranks
        assert [w.member for w in self.mesh.attention] == list(epoch.attention)
        assert [w.member for w in ranks.workers] == list(epoch.experts)
        assert epoch.placement == ranks.placement
        for layer, actors in epoch.placement.held.items():
            assert {e for ids in actors for e in ids} == set(range(ranks.experts))
            for worker, ids in zip(ranks.workers, actors, strict=True):
                assert set(ids) <= worker.handle.held[layer]
                assert not worker.handle.dead
        for worker in self.mesh.attention:
            assert (worker.handle.epoch, worker.handle.version) == (epoch.number, epoch.version)
