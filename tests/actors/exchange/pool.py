"""Attention replicas and expert actors that outlive their epochs, as threads of one process."""

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from expertmesh.actors.exchange.base import Exchange
from expertmesh.actors.exchange.elastic import ElasticExchange
from expertmesh.actors.exchange.process_group import open_store
from expertmesh.actors.exchange.roster import Roster
from expertmesh.actors.exchange.serve import MeshServer
from tests.actors.exchange.toy import HOST, Rows, Shape, ToyBank, in_threads

Placement = dict[int, list[list[int]]]
# Called before each call of the walk: phase, layer, micro-batch.
Before = Callable[[str, int, int], None]


def nothing(phase: str, layer: int, micro: int) -> None:
    pass


def walk(
    exchange: Exchange, layers: Sequence[int], parts: Sequence[Rows], before: Before = nothing
) -> list[Tensor]:
    """One step as the model makes it, a part per micro-batch; per part the sums of all layers."""
    sums: list[list[Tensor]] = [[] for _ in parts]
    before("begin", -1, 0)
    exchange.begin_step(max(part[0].shape[0] for part in parts), len(parts))
    flying = {}
    for layer, last in zip((*layers, None), (None, *layers), strict=True):
        for micro, part in enumerate(parts):
            if last is not None:
                before("combine", last, micro)
                sums[micro].append(exchange.combine(flying[micro]))
            if layer is not None:
                before("dispatch", layer, micro)
                flying[micro] = exchange.dispatch(layer, *part, micro)
    before("end", -1, 0)
    exchange.end_step()
    return [torch.stack(layers) for layers in sums]


@dataclass
class Epoch:
    roster: Roster
    servers: list[MeshServer]
    store: object  # where its ranks met
    threads: list[threading.Thread] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)  # not the exceptions: those hold the epoch

    def serve(self, server: MeshServer) -> None:
        try:
            server.run()
        except BaseException as error:
            self.errors.append(f"{type(error).__name__}: {error}")


class Pool:
    """`shape` gives the sizes; who takes part and who holds what changes from epoch to epoch."""

    def __init__(self, shape: Shape, hold_s: float = 10.0) -> None:
        self.shape, self.hold_s = shape, hold_s
        self.epochs: list[Epoch] = []
        self.woken = [threading.Event() for _ in range(shape.attention)]
        self.replicas = [self._replica(event) for event in self.woken]

    def _replica(self, event: threading.Event) -> ElasticExchange:
        return ElasticExchange(self.hold_s, event.set)

    def add_replica(self) -> ElasticExchange:
        event = threading.Event()
        replica = self._replica(event)
        self.woken.append(event)
        self.replicas.append(replica)
        return replica

    @property
    def epoch(self) -> Epoch:
        return self.epochs[-1]

    def bank(self, placed: Placement, actor: int) -> ToyBank:
        held = {layer: actors[actor] for layer, actors in placed.items()}
        return ToyBank(held, self.shape.num_experts, self.shape.width)

    def prepare(
        self,
        placed: Placement | None = None,
        version: int = 0,
        among: Sequence[ElasticExchange] | None = None,
        banks: Sequence[ToyBank] | None = None,
    ) -> Epoch:
        """The next epoch, met and offered to `among` (all replicas), not yet switched to."""
        shape, replicas = self.shape, self.replicas if among is None else among
        store, address = open_store(HOST)
        placed = placed or shape.roster(address).placed
        actors = len(next(iter(placed.values())))
        banks = banks or [self.bank(placed, actor) for actor in range(actors)]
        number = self.epochs[-1].roster.epoch + 1 if self.epochs else 3
        roster = Roster(number, len(replicas), actors, placed, address, version)
        epoch = Epoch(roster, [], store)

        def attend(rank: int) -> None:
            event = self.woken[self.replicas.index(replicas[rank])]
            replicas[rank].offer(shape.attention_rank(roster, rank, event.set))

        work: list[Callable[[], object]] = [partial(attend, r) for r in range(len(replicas))]
        work += [partial(shape.expert_rank, roster, a, banks[a]) for a in range(actors)]
        epoch.servers = in_threads(work)[len(replicas) :]
        for server in epoch.servers:
            thread = threading.Thread(target=epoch.serve, args=(server,), daemon=True)
            epoch.threads.append(thread)
            thread.start()
        self.epochs.append(epoch)
        return epoch

    def switch(self, epoch: Epoch, among: Sequence[ElasticExchange] | None = None) -> None:
        for replica in self.replicas if among is None else among:
            replica.switch(epoch.roster.epoch)

    def renew(self, placed: Placement | None = None) -> Epoch:
        epoch = self.prepare(placed)
        self.switch(epoch)
        return epoch

    def expected(self, parts: Sequence[Rows]) -> list[Tensor]:
        oracle = self.shape.oracle(self.epochs[0].roster)
        return walk(oracle, self.shape.layers, parts)

    def close(self) -> None:
        for replica in self.replicas:
            replica.close()
        for epoch in self.epochs:
            for thread in epoch.threads:
                thread.join(10)
                assert not thread.is_alive(), f"epoch {epoch.roster.epoch}: an expert did not end"
        for thread in threading.enumerate():
            if thread.name.startswith("exchange-listen"):
                thread.join(10)
                assert not thread.is_alive(), "a listener did not end"

    def __enter__(self) -> "Pool":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Steward:
    """Makes a new epoch whenever a replica's breaks, in a thread, as the control plane does."""

    def __init__(self, pool: Pool, placements: Sequence[Placement] = ()) -> None:
        """placements: of the epochs to come, in turn."""
        self._pool, self._placements = pool, placements
        self._stop = threading.Event()
        self.errors: list[BaseException] = []
        self._thread = threading.Thread(target=self._main, daemon=True)

    def __enter__(self) -> "Steward":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join(10)
        assert not self._thread.is_alive() and not self.errors, self.errors

    def _main(self) -> None:
        try:
            made = 0
            while not self._stop.is_set():
                if any(replica.broken for replica in self._pool.replicas):
                    turn = made % len(self._placements) if self._placements else 0
                    self._pool.renew(self._placements[turn] if self._placements else None)
                    made += 1
                time.sleep(0.001)
        except BaseException as error:
            self.errors.append(error)


def company(
    pool: Pool, works: Mapping[int, Callable[[], Any]], beside: Callable[[], Any] | None = None
) -> list[Any]:
    """Every replica does its work, if it has some, and joins the steps of others until all have
    done theirs, and `beside` is done too: as engine loops do."""
    left, stopped, lock = {*works, -1}, threading.Event(), threading.Lock()

    def done(index: int) -> None:
        with lock:
            left.discard(index)
        if not left:
            stopped.set()
            for woken in pool.woken:
                woken.set()

    def engine(index: int) -> Any:
        replica, woken, result = pool.replicas[index], pool.woken[index], None
        try:
            if index in works:
                result = works[index]()
        finally:
            done(index)
        while not stopped.is_set():
            woken.wait()
            woken.clear()
            while replica.peer_waiting and not stopped.is_set():
                replica.join_step()
        return result

    def conduct() -> None:
        try:
            if beside is not None:
                beside()
        finally:
            done(-1)

    engines = [partial(engine, index) for index in range(len(pool.replicas))]
    return in_threads([*engines, conduct])[:-1]
