"""A mesh in bad weather: replicas that work, idle and die, actors that die, stall and join, and
routing and epochs that change. Every sum must be that of one process, and nobody may hang.

`python -m tests.actors.exchange.storm --steps 100000 --ranks 8` prints what happened as JSON.
"""

import argparse
import json
import random
import sys
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable

import torch
from torch import Tensor

from expertmesh.actors.exchange.elastic import ElasticExchange
from expertmesh.actors.exchange.roster import Routing
from expertmesh.actors.exchange.settings import ExchangeSettings
from tests.actors.exchange.pool import Placement, Pool, walk
from tests.actors.exchange.toy import Rows, Shape, ToyBank

LAYERS = (1, 3)
DEADLINE_S, SILENCE_S = 2.0, 60.0
# How often what happens, per step of the mesh.
FLIP, TROUBLE, STALL = 0.2, 0.02, 0.0004


class StormBank(ToyBank):
    """Now and then slow; stalls or breaks when told to."""

    def __init__(self, shape: Shape, placed: Placement, actor: int) -> None:
        held = {layer: actors[actor] for layer, actors in placed.items()}
        super().__init__(held, shape.num_experts, shape.width)
        self.stall_s, self.broken = 0.0, False

    def partial_sum(self, layer: int, *args: Tensor) -> Tensor:
        stall, self.stall_s = self.stall_s, 0.0
        if stall or random.random() < 0.005:
            time.sleep(stall or 0.003)
        if self.broken:
            raise ValueError("out of memory")
        return super().partial_sum(layer, *args)


class Replica:
    """An engine loop with random work."""

    def __init__(self, storm: "Storm", index: int) -> None:
        self._storm, self.index = storm, index
        self.exchange: ElasticExchange = storm.pool.replicas[index]
        self._random = random.Random(storm.seed * 1000 + index)
        self.position: tuple[object, ...] = ("start",)
        self.dying = self.done = False
        self.thread = threading.Thread(target=self._main, name=f"replica-{index}", daemon=True)

    def _main(self) -> None:
        try:
            while not self.dying and not self._storm.calm:
                self._turn()
            self.done = True
            while not self.dying and not self._storm.finished:
                self._join()
        except Exception as error:
            if not self.dying:
                self._storm.failures.append(f"replica {self.index} {self.position}: {error!r}")
                traceback.print_exc()
        self.done = True

    def _turn(self) -> None:
        chance = self._random.random()
        if chance < 0.6:
            self._work()
        elif chance < 0.7:
            time.sleep(self._random.random() * 0.002)
        self._join()

    def _join(self) -> None:
        woken = self._storm.pool.woken[self.index]
        self.position = ("idle",)
        woken.wait(self._random.random() * 0.003)
        woken.clear()
        while self.exchange.peer_waiting and not self.dying:
            self.position = ("join", self.exchange.epoch)
            self.exchange.join_step()
            self._storm.count["joined"] += 1

    def _work(self) -> None:
        shape, draw = self._storm.pool.shape, self._random
        parts: list[Rows] = []
        for _ in range(draw.choice((1, 1, 2))):
            rows = draw.choice((0, 1, 2, 3, 5, 8, 19))
            among = None if draw.random() < 0.8 else draw.sample(range(shape.num_experts), 2)
            parts.append(shape.rows(rows, draw.randrange(10**6), among))
        epoch = self.exchange.epoch
        got = walk(self.exchange, LAYERS, parts, self._note)
        want = walk(self._storm.oracle, LAYERS, parts)
        if not all(torch.equal(*pair) for pair in zip(got, want, strict=True)):
            self._storm.failures.append(f"replica {self.index}: sums differ after {self.position}")
        self._storm.count["worked"] += 1
        self._storm.count["resumed"] += epoch != self.exchange.epoch

    def _note(self, phase: str, layer: int, micro: int) -> None:
        self.position = (phase, layer, micro, self.exchange.epoch)
        if self._random.random() < 0.01:
            time.sleep(0.001)


class Storm:
    def __init__(self, steps: int, ranks: int, seed: int = 0, layout: str = "direct") -> None:
        settings = ExchangeSettings(
            layout=layout, deadline_s=DEADLINE_S, join_deadline_s=20.0, max_rows=8
        )
        shape = Shape(
            attention=1, layers=LAYERS, num_experts=6, width=4, top_k=2, settings=settings
        )
        self.steps, self.ranks, self.seed = steps, ranks, seed
        self.pool = Pool(shape, hold_s=30.0)
        self.oracle = shape.oracle(shape.roster(("", 0)))
        self.count: Counter[str] = Counter()
        self.failures: list[str] = []
        self.calm = self.finished = False  # no new work; nobody needs company any more
        self.replicas = [Replica(self, 0)]
        self._random = random.Random(seed)
        self._version = self._past_steps = 0
        self._known: dict[int, Placement] = {}  # routings that a step may use
        self._banks: list[StormBank] = []

    def run(self) -> dict[str, object]:
        began = time.monotonic()
        self.replicas[0].thread.start()
        self._next_epoch()
        self._watch(lambda: self.made() >= self.steps)
        self.calm = True
        self._watch(lambda: all(replica.done for replica in self._living()))
        self.finished = True
        for replica in self.replicas:
            replica.thread.join(10)
            if replica.thread.is_alive():
                self.failures.append(f"replica {replica.index} hangs at {replica.position}")
        if not self.failures:
            self.pool.close()
        seconds = round(time.monotonic() - began, 1)
        sizes = {"steps": self.made(), "ranks": self.ranks, "seed": self.seed}
        return sizes | {"seconds": seconds} | self.count | {"failures": self.failures}

    def made(self) -> int:
        """Steps of the mesh, over all epochs."""
        present = self.pool.epochs[-1].servers if self.pool.epochs else ()
        return self._past_steps + max((server.steps for server in present), default=0)

    def _living(self) -> list[Replica]:
        return [replica for replica in self.replicas if not replica.dying]

    def _watch(self, over: Callable[[], bool]) -> None:
        """Until it is over: weather by the step, and another epoch whenever one broke."""
        moved, seen = time.monotonic(), self.made()
        while not over() and not self.failures:
            made = self.made()
            if made > seen:
                moved = time.monotonic()
            elif time.monotonic() - moved > SILENCE_S:
                self.failures.append(f"nothing moves: {self._positions()}")
            for _ in range(0 if self.calm else made - seen):
                self._happen()
            seen = made
            if any(replica.exchange.broken for replica in self._living()):
                self._next_epoch()
            time.sleep(0.001)

    def _positions(self) -> str:
        frames = sys._current_frames()
        lines = []
        for replica in self.replicas:
            stack = traceback.extract_stack(frames.get(replica.thread.ident or 0), limit=4)
            where = " < ".join(f"{frame.name}:{frame.lineno}" for frame in reversed(stack))
            lines.append(f"replica {replica.index} {replica.position} in {where}")
        for server in self.pool.epoch.servers:
            lines.append(f"{server.roster.name(server.rank)}: {server.steps} steps")
        return "; ".join(lines)

    # --- what happens ---------------------------------------------------------------------------

    def _happen(self) -> None:
        chance = self._random.random()
        if chance < STALL:
            self._some_bank().stall_s = DEADLINE_S * 1.5
            self.count["stalls"] += 1
        elif chance < STALL + TROUBLE:
            self._random.choice(
                (self._kill_actor, self._break_actor, self._kill_replica, self._cut, self._renew)
            )()
        elif chance < STALL + TROUBLE + FLIP:
            self._flip()

    def _some_bank(self) -> StormBank:
        return self._random.choice(self._banks)

    def _kill_actor(self) -> None:
        self._random.choice(self.pool.epoch.servers).close()
        self.count["actors_killed"] += 1

    def _break_actor(self) -> None:
        self._some_bank().broken = True
        self.count["actors_broken"] += 1

    def _kill_replica(self) -> None:
        living = self._living()
        if len(living) > 1:
            replica = self._random.choice(living)
            replica.dying = True
            replica.exchange.close()
            self.count["replicas_killed"] += 1

    def _cut(self) -> None:
        self._random.choice(self._living()).exchange.abort("cut off")
        self.count["cut"] += 1

    def _renew(self) -> None:
        self._next_epoch()
        self.count["planned"] += 1

    def _place(self, actors: int) -> Placement:
        """Every expert with one actor and, by chance, with more."""
        placed: Placement = {}
        for layer in LAYERS:
            held: list[list[int]] = [[] for _ in range(actors)]
            for expert in range(self.pool.shape.num_experts):
                copies = self._random.choice((1, 1, min(2, actors), actors))
                for actor in self._random.sample(range(actors), copies):
                    held[actor].append(expert)
            placed[layer] = held
        return placed

    def _flip(self) -> None:
        """Another routing, known to the replicas at different times; then old experts go."""
        self._version += 1
        placed = self._place(len(self._banks))
        self._known[self._version] = placed
        for actor, bank in enumerate(self._banks):
            for layer in LAYERS:
                bank.hold(layer, placed[layer][actor])
        living = self._living()
        self._random.shuffle(living)
        for replica in living:
            replica.exchange.route(Routing(self._version, placed))
            if self._random.random() < 0.3:
                time.sleep(self._random.random() * 0.002)
        floor = min(replica.exchange.version for replica in living)
        for older in [version for version in self._known if version < floor]:
            del self._known[older]
        for actor, (bank, server) in enumerate(
            zip(self._banks, self.pool.epoch.servers, strict=True)
        ):
            server.version_floor = floor
            for layer in LAYERS:
                bank.keep(layer, {e for known in self._known.values() for e in known[layer][actor]})
        self.count["flips"] += 1

    def _next_epoch(self) -> None:
        """With other actors, and now and then a new replica."""
        living = self._living()
        if len(living) < self.ranks - 1 and self._random.random() < 0.3:
            self.pool.add_replica()
            living.append(Replica(self, len(self.replicas)))
            self.replicas.append(living[-1])
            living[-1].thread.start()
        least, most = max(1, 4 - len(living)), self.ranks - len(living)
        self._version += 1
        placed = self._place(self._random.randint(least, most))
        self._banks = [StormBank(self.pool.shape, placed, a) for a in range(len(placed[LAYERS[0]]))]
        exchanges = [replica.exchange for replica in living]
        epoch = self.pool.prepare(placed, self._version, exchanges, self._banks)
        self._known = {self._version: placed}
        self._random.shuffle(exchanges)
        for exchange in exchanges:
            exchange.switch(epoch.roster.epoch)
            if self._random.random() < 0.3:
                time.sleep(self._random.random() * 0.002)
        for over in self.pool.epochs[:-1]:
            for thread in over.threads:
                thread.join(10)
                if thread.is_alive():
                    self.failures.append(f"an actor of epoch {over.roster.epoch} does not end")
            self._past_steps += max(server.steps for server in over.servers)
        del self.pool.epochs[:-1]
        self.count["epochs"] += 1


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=10_000, help="of the mesh, over all epochs")
    parser.add_argument("--ranks", type=int, default=8, help="attention and expert ranks at most")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--layout", choices=("direct", "exact", "padded"), default="direct")
    options = parser.parse_args()
    torch.set_num_threads(1)
    report = Storm(options.steps, options.ranks, options.seed, options.layout).run()
    print(json.dumps(report, indent=1))
    sys.exit(1 if report["failures"] else 0)


if __name__ == "__main__":
    main()
