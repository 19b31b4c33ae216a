"""Whether the tiers stay alive at the edge: `python -m tests.bench state_liveness`.

Sessions are put, kept, looked for, loaded, abandoned and dropped against a store whose host memory
holds a tenth of what they use and whose disk is full, failing, slow, or hangs, by turns (kv-state
5, G10). Time is on a clock that every operation moves by a little, so that ten seconds of a hanging
disk are ten seconds of the store's deadlines. Counted are operations, wrong bytes, fetches that
ended late, references left and threads dead at the end, and how memory grew.
"""

import gc
import random
import sys
import time
from argparse import ArgumentParser
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import psutil

from expertmesh.actors.state.item import Item
from expertmesh.actors.state.settings import StateSettings
from expertmesh.actors.state.tiers import store as tiers_store
from expertmesh.actors.state.tiers.ceiling import Ceiling
from expertmesh.actors.state.tiers.fetch import StoreFetch
from expertmesh.actors.state.tiers.store import TieredStore
from tests.bench.state_restore import restore_bandwidth
from tests.support.slow_disk import SlowDisk, Weather
from tests.support.tiers import LAYOUT, FakeClock, names, pages, same, snapshot, until

DEADLINE_S = 2.0  # of every fetch, on the store's clock
OPERATION_S = 0.002  # by which an operation moves it
SESSIONS, PAGES = 400, 4
OUTSTANDING = 12  # fetches at a time
WEATHER = 5000  # operations, ten seconds, until the disk is in another state
SAMPLE = 5000  # operations between two looks at memory
SETTLED = 0.4  # of the operations: until then the tiers fill and allocators grow


@dataclass
class Load:
    fetch: StoreFetch
    items: Sequence[Item]
    begun: float


@dataclass
class Soak:
    """One engine's worth of calls, from one thread."""

    store: TieredStore
    clock: FakeClock
    rng: random.Random
    sessions: list[list[Item]]
    loads: list[Load] = field(default_factory=list)
    delays: "array[float]" = field(default_factory=lambda: array("f"))
    counts: dict[str, int] = field(default_factory=dict)
    wrong: int = 0

    def step(self) -> None:
        """One operation of a session."""
        self.clock.now += OPERATION_S
        self._collect()
        session = self.sessions[min(int(self.rng.expovariate(6) * SESSIONS), SESSIONS - 1)]
        verb = self.rng.choices(
            (self._put, self._fetch, self._look, self._keep, self._drop, self._abandon),
            (40, 40, 10, 6, 2, 2),
        )[0]
        verb(session[: self.rng.randrange(1, len(session) + 1)])

    def _put(self, items: Sequence[Item]) -> None:
        durable = self.rng.random() < 0.1
        for item in items:
            if self.store.where(item.header.name) is None:
                self.count("taken" if self.store.put(item, durable=durable) else "refused")

    def _fetch(self, items: Sequence[Item]) -> None:
        if len(self.loads) >= OUTSTANDING:
            return
        fetch = self.store.fetch(names(items), DEADLINE_S)
        self.loads.append(Load(fetch, items, self.clock.now))

    def _look(self, items: Sequence[Item]) -> None:
        self.store.load_seconds(names(items))
        self.store.touch(names(items))

    def _keep(self, items: Sequence[Item]) -> None:
        pinned = self.rng.random() < 0.5
        self.store.keep(names(items), pinned=pinned)
        (self.store.unpin if pinned else self.store.pin)(names(items)[:1])
        self.store.unpin(names(items))
        self.store.flush()

    def _drop(self, items: Sequence[Item]) -> None:
        self.store.drop(names(items))
        self.store.look()

    def _abandon(self, items: Sequence[Item]) -> None:
        """Half of the time without a word."""
        if self.loads:
            load = self.loads.pop(self.rng.randrange(len(self.loads)))
            if self.rng.random() < 0.5:
                load.fetch.cancel()

    def _collect(self) -> None:
        for load in [load for load in self.loads if load.fetch.done]:
            self.loads.remove(load)
            self.delays.append(self.clock.now - load.begun)
            found = load.fetch.items
            self.count(load.fetch.reason or "loaded")
            if found is not None:
                at = self.rng.randrange(len(found))
                self.wrong += not same(load.items[at], found[at])
            load.fetch.cancel()

    def count(self, what: str) -> None:
        self.counts[what] = self.counts.get(what, 0) + 1


def soak(operations: int, seed: int) -> dict[str, Any]:
    clock, rng = FakeClock(), random.Random(seed)
    disk = SlowDisk(clock=clock)
    sessions = [[*pages(f"{at}", PAGES), snapshot(f"{at}", PAGES - 1)] for at in range(SESSIONS)]
    demand = sum(item.nbytes for session in sessions for item in session)
    settings = StateSettings.model_validate({"host_bytes": demand // 10, "codec": "lossless"})
    store = TieredStore(LAYOUT, settings, disk=disk.log, clock=clock)
    run, weather = Soak(store, clock, rng, sessions), Weather(disk)
    # A disk that never evicts would hold all of the demand: its own eviction is another bench's.
    process, memory = psutil.Process(), list[tuple[int, float]]()
    began = time.perf_counter()
    for at in range(operations):
        if at % WEATHER == 0:
            weather.change()
        if at % SAMPLE == 0:
            gc.collect()
            memory.append((at, process.memory_info().rss / 1e6))
        run.step()
    seconds = time.perf_counter() - began
    result = {
        "operations": operations,
        "seconds": round(seconds, 1),
        "weather": weather.seen,
        "demand_mb": round(demand / 1e6, 1),
        "fetches": run.counts,
        "slow_reads": disk.slow_reads,
        "wrong_bytes": run.wrong,
        "rss_mb_per_10k_operations": round(_slope(memory, operations) * 1e4, 4),
        **_delays(run.delays),
        **_quiesce(run, weather, store),
    }
    disk.records.clear()
    return result


def _slope(memory: Sequence[tuple[int, float]], operations: int) -> float:
    late = np.array([(at, rss) for at, rss in memory if at >= SETTLED * operations])
    return float(np.polyfit(late[:, 0], late[:, 1], 1)[0]) if len(late) > 2 else 0.0


def _delays(delays: Sequence[float]) -> dict[str, float]:
    return {
        "deadline_s": DEADLINE_S,
        "delay_p50_s": round(float(np.percentile(delays, 50)), 4),
        "delay_p99_s": round(float(np.percentile(delays, 99)), 4),
        "delay_max_s": round(max(delays), 4),
    }


def _quiesce(run: Soak, weather: Weather, store: TieredStore) -> dict[str, Any]:
    """After all is let go and the sky is clear: what is left, and whether it still works."""
    weather.clear()
    for load in run.loads:
        load.fetch.cancel()
    run.loads.clear()
    gc.collect()
    run.clock.now += 600.0
    until(lambda: not store.stats().host.queued and not store.stats().disk.queued)
    old = store.flush()  # tells what was lost
    until(lambda: old.done)
    gone = [item for item in run.sessions[0] if store.where(item.header.name) is None]
    taken = all(store.put(item, durable=True) for item in gone)
    flush, fetch = store.flush(), store.fetch(names(run.sessions[0]), 1e6)
    until(lambda: flush.done and fetch.done)
    problems = [flush.reason, fetch.reason] + ([] if taken else ["refused"])
    fetch.cancel()
    until(lambda: store.in_use == (0, 0, 0))
    stats = store.stats()
    store.close(20.0)
    return {
        "problems_afterwards": [problem for problem in problems if problem],
        "references_left": list(store.in_use),
        "threads_dead": stats.threads_dead,
        "host": {"evictions": stats.host.evictions, "failures": stats.host.failures},
        "disk": {"refused": stats.disk.refused, "failures": stats.disk.failures},
    }


def against_the_ceiling(requests: int, seed: int) -> dict[str, float]:
    """Hit rate where host memory holds everything, beside what no cache could exceed."""
    rng, ceiling = random.Random(seed), Ceiling()
    settings = StateSettings.model_validate({"host_bytes": 1 << 28, "queue": 4096})
    store = TieredStore(LAYOUT, settings)
    chains = [pages(f"c{at}", PAGES) for at in range(SESSIONS)]
    hits = lookups = 0
    for _ in range(requests):
        chain = rng.choice(chains)[: rng.randrange(1, PAGES + 1)]
        ceiling.add(item.header.key for item in chain)
        lookups += len(chain)
        for item in chain:
            hits += store.where(item.header.name) is not None
            until(lambda item=item: store.put(item))  # type: ignore[misc]
    store.close()
    return {"hit_rate": round(hits / lookups, 4), "ceiling": round(ceiling.ratio, 4)}


def main(arguments: list[str]) -> dict[str, Any]:
    parser = ArgumentParser(prog="state_liveness", description=__doc__)
    parser.add_argument("--operations", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args(arguments)
    tiers_store.TRANSIT_BYTES = 0  # host memory of a tenth of the demand, though there is a disk
    sys.setswitchinterval(0.0005)  # or this thread would keep the store's from running
    return {
        "soak": soak(options.operations, options.seed),
        "capacity_for_all": against_the_ceiling(max(100, options.operations // 200), options.seed),
        "restore": restore_bandwidth(),
    }
