"""Where snapshots of recurrent state are kept: policies on page chains, without a model.

A policy holds at most `budget` snapshots, all of one size. Positions are in pages. Latent pages are
taken as always there, which is the same for all policies: they cost a thirtieth of a snapshot.
"""

from collections import Counter, OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from scipy.optimize import linprog
from scipy.sparse import csr_matrix

from expertmesh.actors.state.eviction import SnapshotOrder
from expertmesh.actors.state.prefix import thin

Chain = Sequence[int]  # names of a prompt's whole pages; a name stands for the whole prefix


@dataclass
class Request:
    """usable: pages that may be skipped (at least one token is computed). known: of the chain,
    pages that earlier prompts had. length: tokens."""

    chain: list[int]
    usable: int
    known: int
    length: int


@dataclass
class Policy:
    """LRU over prompt boundaries; others change what is saved, and who goes."""

    budget: int
    kept: OrderedDict[int, int] = field(default_factory=OrderedDict)  # name -> position
    made: int = 0
    most: int = 0

    def hit(self, request: Request) -> int:
        """The deepest usable position with a snapshot."""
        for at in range(min(request.usable, request.known), 0, -1):
            if request.chain[at - 1] in self.kept:
                self.used(request.chain[at - 1])
                return at
        return 0

    def used(self, name: int) -> None:
        self.kept.move_to_end(name)

    def wanted(self, request: Request, hit: int) -> list[int]:
        """Positions behind `hit` to save while the rest is computed."""
        return [request.usable]

    def serve(self, request: Request) -> int:
        """Pages that are not computed again."""
        hit = self.hit(request)
        for at in self.wanted(request, hit):
            if at > hit:
                self.save(request, at)
        return hit

    def save(self, request: Request, at: int) -> None:
        name = request.chain[at - 1]
        if name in self.kept:
            self.used(name)
            return
        if len(self.kept) >= self.budget:
            del self.kept[self.victim()]
        self.kept[name] = at
        self.made += 1
        self.most = max(self.most, len(self.kept))

    def victim(self) -> int:
        return next(iter(self.kept))


class Dense(Policy):
    """Every page, for ever: the most that can be had."""

    def wanted(self, request: Request, hit: int) -> list[int]:
        return list(range(hit + 1, request.usable + 1))


class Ours(Policy):
    """What the engine does: junctions, prompt boundaries and a thinned ladder, in SnapshotOrder."""

    def __init__(self, budget: int, ladder_pages: int = 64) -> None:
        super().__init__(budget)
        self.step = ladder_pages
        self.order = SnapshotOrder[int]()

    def serve(self, request: Request) -> int:
        end = request.usable
        hit = self.hit(request)
        if hit:
            self.order.used(request.chain[hit - 1], deeper=hit < end)
        self.order.tick()
        junction = max(hit, min(request.known, end))
        places = {junction, end, *range(self.step, end + 1, self.step)}
        rungs: list[int] = []
        for at in sorted(place for place in places if hit < place):
            if request.chain[at - 1] in self.kept:
                continue
            rung = at % self.step == 0 and at not in (end, junction)
            full = len(self.kept) >= self.budget
            least = self.order.victim()
            if rung and full and least is not None and self.order.likely(least):
                continue
            self.save(request, at)
            self.order.made(request.chain[at - 1], rung=rung)
            if rung:
                rungs.append(at)
                stay = thin(rungs, at, self.step)
                for gone in set(rungs).difference(stay):
                    if self.kept.pop(request.chain[gone - 1], None) is not None:
                        self.order.gone(request.chain[gone - 1])
                rungs = stay
        return hit

    def used(self, name: int) -> None:
        pass

    def victim(self) -> int:
        name = self.order.victim()
        assert name is not None
        self.order.gone(name)
        return name


class TinyLfu(Policy):
    """LRU, but what is rarer than the one that would go for it is not let in."""

    def __init__(self, budget: int) -> None:
        super().__init__(budget)
        self.seen: Counter[int] = Counter()

    def serve(self, request: Request) -> int:
        for name in request.chain[: request.usable]:
            self.seen[name] += 1
        if self.seen.total() > 200 * self.budget * 64:  # ages, as its sketch does
            self.seen = Counter(
                {name: count // 2 for name, count in self.seen.items() if count > 1}
            )
        return super().serve(request)

    def save(self, request: Request, at: int) -> None:
        full = len(self.kept) >= self.budget and request.chain[at - 1] not in self.kept
        if full and self.seen[request.chain[at - 1]] < self.seen[self.victim()]:
            return
        super().save(request, at)


class Marconi(Policy):
    """Saves where two prompts have parted, and the end; evicts the least of recency and of what it
    saves per byte, both scaled to 0..1 (after Marconi, MLSys 2025, from its description)."""

    weight = 0.5

    def __init__(self, budget: int) -> None:
        super().__init__(budget)
        self.clock, self.last = 0, dict[int, int]()

    def used(self, name: int) -> None:
        self.clock += 1
        self.last[name] = self.clock
        self.kept.move_to_end(name)

    def wanted(self, request: Request, hit: int) -> list[int]:
        return [min(request.known, request.usable), request.usable]

    def save(self, request: Request, at: int) -> None:
        super().save(request, at)
        self.clock += 1
        self.last[request.chain[at - 1]] = self.clock

    def victim(self) -> int:
        names = list(self.kept)
        deep = np.fromiter(self.kept.values(), float)
        when = np.array([self.last[name] for name in names], float)
        score = _scaled(when) + self.weight * _scaled(deep)
        return names[int(score.argmin())]


def _scaled(values: np.ndarray) -> np.ndarray:
    low, high = values.min(), values.max()
    return (values - low) / (high - low) if high > low else np.zeros_like(values)


def best_offline(requests: Sequence[Request], budget: int) -> float:
    """Tokens that a policy could have skipped that knew the future and held `budget` snapshots: an
    upper bound that no policy reaches.

    Each request can use the deepest position that earlier prompts share with it, if a snapshot has
    been held there since a prompt last passed it. Which to hold is interval packing, whose linear
    program is exact. What it leaves out, a shallower hit instead, is granted for nothing as
    far as the snapshots that are always held anyway.
    """
    passed: dict[int, int] = {}
    intervals: list[tuple[int, int, int]] = []  # from, to, tokens
    for now, request in enumerate(requests):
        at = min(request.known, request.usable)
        if at:
            intervals.append((passed[request.chain[at - 1]], now, at * 64))
        passed.update(dict.fromkeys(request.chain, now))
    rows, columns = list[int](), list[int]()
    for number, (begin, end, _) in enumerate(intervals):
        rows += range(begin, end)
        columns += [number] * (end - begin)
    held = csr_matrix((np.ones(len(rows)), (rows, columns)), (len(requests), len(intervals)))
    value = np.array([tokens for *_, tokens in intervals], float)
    solved = linprog(-value, A_ub=held, b_ub=np.full(len(requests), budget), bounds=(0, 1))
    return float(-solved.fun)
