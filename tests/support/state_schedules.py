"""Random schedules over engines that share cached state, each answer held against the oracle.

A world is a pair of engines (replicas) over one store, with pools too small for what is asked. It
lives for many schedules, so that what one leaves behind is what the next one finds. A schedule is a
few requests (prompts that begin alike, edits, forks, second turns, other tenants) with steps,
aborts, preemption, eviction, losses and failovers in between, and then everything is finished.

All is drawn from one seed: (seed, number) names a schedule, and replays it.
"""

import errno
import random
import threading
import time
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import msgspec

from expertmesh.actors.attention.engine import Engine
from expertmesh.actors.attention.messages import GenerateRequest, RequestRefused
from expertmesh.actors.model.batch import PAGE_TOKENS
from expertmesh.actors.state.cache import StateCache
from tests.support.engines import Answer, check_books, collect, request, spill_of
from tests.support.faulty_files import FaultyFiles
from tests.support.runner import Runner
from tests.support.state_below import STALL_S, Below, wait_for
from tests.support.state_model import VOCAB, cached
from tests.support.state_oracle import Oracle, Piece, Row, tap

LENGTHS = (1, 2, 17, 63, 64, 65, 66, 100, 127, 128, 129, 150, 191, 192, 193, 256, 257, 300)
LONG = (384, 450, 513)  # more pages than the smallest pools have, for old pages off the device
EDITS = (1, 10, 64, 100, 128, 150)
TAILS = (1, 30, 63, 64, 65)
TENANTS = ("", "b")
MOST_TOKENS = max(LENGTHS)
MOST_STEPS = 4000  # far beyond what any schedule needs


class Mismatch(AssertionError):
    """An answer that is not what the model alone gives."""


class Text(NamedTuple):
    """A document up to `length`, in which another begins at `edit`; 0: unedited."""

    document: int
    edit: int
    length: int


def _documents() -> list[list[int]]:
    rng = random.Random(20)
    return [[rng.randrange(VOCAB) for _ in range(max(LONG))] for _ in range(5)]


DOCUMENTS = _documents()


def tokens_of(text: Text) -> list[int]:
    whole = DOCUMENTS[text.document]
    if text.edit:
        other = DOCUMENTS[(text.document + 1 + text.edit) % len(DOCUMENTS)]
        whole = whole[: text.edit] + other[text.edit :]
    return whole[: text.length]


@dataclass
class Sizes:
    """Of one engine; drawn so that something is always short. window: of requests whose old pages
    are not on the device. far_pages: how many of those, of all together, there may be in host
    memory; far_pieces: of one page each, on disk."""

    pages: int
    slots: int
    snapshots: int
    step_tokens: int
    ladder_tokens: int
    max_bypass: int
    ping_pong: bool
    window: int
    far_pages: int
    far_pieces: int

    @classmethod
    def draw(cls, rng: random.Random) -> "Sizes":
        return cls(
            pages=rng.choice((6, 7, 9, 14, 40)),
            slots=rng.randint(1, 4),
            snapshots=rng.choice((1, 2, 3, 6, 24)),
            step_tokens=rng.choice((64, 65, 96, 128, 200, 512)),
            ladder_tokens=rng.choice((64, 128, 256)),
            max_bypass=rng.randint(0, 3),
            ping_pong=rng.random() < 0.1,
            window=rng.choice((64, 128)),
            far_pages=rng.choice((2, 4, 5, 1000)),
            far_pieces=rng.choice((0, 2, 8)),
        )


@dataclass
class Asked:
    """A request in an engine, and what has come of it. known: answer tokens that it resumes.
    stood: where its session has stood, and how it came there."""

    request: GenerateRequest
    engine: int
    answer: Answer = field(default_factory=Answer)
    known: list[int] = field(default_factory=list)
    cached: int = 0
    aborted: bool = False
    stood: list[tuple[Piece, ...]] = field(default_factory=list)

    @property
    def within_answer(self) -> bool:
        """Whether it began behind its prompt, in what it resumes: all of the prompt counts as
        cached then, wherever that ends."""
        return bool(self.known) and self.cached == len(self.request.prompt_ids)


@dataclass
class Counts:
    """What has been tried, so that a run that tried nothing is seen."""

    schedules: int = 0
    requests: int = 0
    rows: int = 0
    cached_tokens: int = 0
    prompt_tokens: int = 0
    aborts: int = 0
    preemptions: int = 0
    failovers: int = 0
    evictions: int = 0
    restarts: int = 0
    losses: int = 0
    offloaded: int = 0  # requests with old pages off the device
    spilled: int = 0  # bytes of old pages that went to disk
    lost: int = 0  # times that requests began again, or ended, as they had lost them
    continued: int = 0  # sessions that went on from where they stood
    mismatches: int = 0


class World:
    """Two engines and what lies below them, over fresh, poisoned state."""

    def __init__(self, seed: int, runner: Runner, oracle: Oracle, below: Below) -> None:
        self.seed, self.runner, self.oracle, self.below = seed, runner, oracle, below
        self.rng = rng = random.Random(seed)
        self.counts = Counts()
        self.sizes = [Sizes.draw(rng) for _ in range(2)]
        self.wake = [threading.Event() for _ in range(2)]
        self.files = FaultyFiles()  # with old pages of running requests
        self.engines = [self._start(which) for which in range(2)]
        self.tips_lost_before = self.tips_lost_by_replaced = self.lost_by_replaced = 0
        self.taps = [tap(engine) for engine in self.engines]
        self.asked: dict[str, Asked] = {}
        self.past: list[tuple[str, list[int], list[int]]] = []  # tenant, prompt, answer
        self.seen: dict[str, list[tuple[str, list[int]]]] = {tenant: [] for tenant in TENANTS}
        # Of each session, its tokens, and how those of the state that each turn left were computed.
        self.sessions: dict[str, tuple[list[int], list[tuple[Piece, ...]]]] = {}
        self.names = 0

    def _start(self, which: int) -> Engine:
        sizes, wake, page = self.sizes[which], self.wake[which], self.runner.state.page_bytes
        store = self.below.open(which, self.runner.state.layout, wake.set)
        engine = cached(
            self.runner, sizes.pages, sizes.slots, store,
            {"snapshots": sizes.snapshots, "ladder_tokens": sizes.ladder_tokens,
             "window_tokens": sizes.window, "offload_bytes": sizes.far_pages * page,
             "offload_disk_bytes": 2 * sizes.far_pieces * page, "offload_disk_tokens": 64,
             **self.below.state},
            arrived=wake, step_tokens=sizes.step_tokens, max_bypass=sizes.max_bypass,
            ping_pong=sizes.ping_pong, ageing_steps=8,
        )  # fmt: skip
        spill = spill_of(engine)
        if spill is not None:
            spill.files = self.files
        return engine

    def schedule(self, number: int) -> None:
        """Runs and checks one. Raises Mismatch, or whatever the engine's own checks raise."""
        rng = self.rng = random.Random(self.seed * 1_000_003 + number)
        self.below.begin(rng)
        self.asked = {}
        for each in self.taps:
            each.seen.clear()
        self.tips_lost_before = self._tips_lost()
        for _ in range(rng.randint(2, 4)):
            self._submit(self._request())
            for _ in range(rng.randint(0, 3)):
                self._event()
        self._finish()
        for name, each in self.asked.items():
            self._check(name, each)
        self.counts.schedules += 1

    # --- what happens ---------------------------------------------------------------------------

    def _request(self) -> GenerateRequest:
        rng = self.rng
        tenant = rng.choice(TENANTS) if rng.random() < 0.2 else ""
        own = [(prompt, answer) for who, prompt, answer in self.past[-8:] if who == tenant]
        session = self._session() if rng.random() < 0.15 else ""
        mode = "offload" if rng.random() < 0.2 and not session else ""
        if session in self.sessions:
            ids = self.sessions[session][0]
            tenant, ids = "", ids + self._tail(len(ids))
        elif own and rng.random() < 0.35:  # another turn
            prompt, answer = rng.choice(own)
            ids = prompt + answer + self._tail(len(prompt) + len(answer))
        else:
            edit = rng.choice(EDITS) if rng.random() < 0.3 else 0
            length = rng.choice(LONG if mode and rng.random() < 0.7 else LENGTHS)
            ids = tokens_of(Text(rng.randrange(3), edit, length))
        self.names += 1
        params: dict[str, Any] = {"priority": rng.choice((0, 0, 0, -1, 1))}
        if rng.random() < 0.05 and not session:
            params |= {"prompt_logprobs": 0}
        made = request(f"r{self.names}", ids, rng.choice((1, 1, 2, 3, 5)), **params)
        return msgspec.structs.replace(
            made, tenant="" if session else tenant, session=session, kv_mode=mode
        )

    def _session(self) -> str:
        """One that nobody uses at the moment, known or new; short enough to go on."""
        busy = {each.request.session for each in self.asked.values()}
        free = [
            name
            for name, (tokens, _) in self.sessions.items()
            if name not in busy and len(tokens) < MOST_TOKENS - 10
        ]
        if free and self.rng.random() < 0.7:
            return self.rng.choice(free)
        self.names += 1
        return f"s{self.names}"

    def _tail(self, length: int) -> list[int]:
        return DOCUMENTS[-1][: max(1, min(self.rng.choice(TAILS), MOST_TOKENS - length))]

    def _submit(self, each: GenerateRequest, engine: int | None = None) -> None:
        engine = self.rng.randrange(2) if engine is None else engine
        try:
            self.engines[engine].submit(each)
        except RequestRefused:
            if not each.kv_mode:  # a long one, and large chunks: too many pages at a time
                raise
            return
        asked = self.asked[each.request_id] = Asked(each, engine, known=list(each.resume_ids))
        if each.session in self.sessions:
            asked.stood = self.sessions.pop(each.session)[1]
        self.seen[each.tenant].append((each.request_id, each.prompt_ids + each.resume_ids))
        self.counts.requests += 1
        self.counts.offloaded += bool(each.kv_mode)

    def _event(self) -> None:
        rng, kind = self.rng, self.rng.random()
        if kind < 0.55:
            for _ in range(rng.randint(1, 4)):
                self._step()
        elif kind < 0.65:
            self._abort()
        elif kind < 0.75:
            self._preempt()
        elif kind < 0.83:
            self._failover()
        elif kind < 0.90:
            engine = self.engines[rng.randrange(2)]
            engine.cache.evict(pages=rng.randint(0, 9), snapshots=rng.randint(0, 4))
            self.counts.evictions += 1
        elif kind < 0.97:
            self.below.damage(rng)
            self.files.flips = rng.randint(0, 2)
            self.files.write_errno = rng.choice((0, 0, errno.ENOSPC))
            self.counts.losses += 1
        else:
            self._restart(rng.randrange(2))

    def _step(self) -> None:
        for engine in self.engines:
            self._collect(engine)
            check_books(engine)
        self.below.tick()

    def _collect(self, engine: Engine) -> None:
        for output in engine.step():
            each = self.asked[output.request_id]
            each.cached = max(each.cached, output.cached_tokens)
            collect([output], {output.request_id: each.answer})
        if engine.failed is not None:
            raise Mismatch(f"the engine has failed: {engine.failed}")

    def _open(self) -> list[str]:
        return [name for name, each in self.asked.items() if each.answer.finish_reason is None]

    def _abort(self) -> None:
        names = self._open()
        if names:
            name = self.rng.choice(names)
            self.asked[name].aborted = True
            self.engines[self.asked[name].engine].abort(name)
            self.counts.aborts += 1

    def _preempt(self) -> None:
        scheduler = self.engines[self.rng.randrange(2)].scheduler
        if scheduler.running:
            scheduler.preempt(self.rng.choice(scheduler.running))
            self.counts.preemptions += 1

    def _failover(self) -> None:
        """A request is taken from one replica, in whatever state it is, and the other goes on."""
        names = [name for name in self._open() if not self.asked[name].aborted]
        if not names:
            return
        name = self.rng.choice(names)
        each = self.asked[name]
        if each.request.params.prompt_logprobs is not None or each.request.session:
            return
        self.engines[each.engine].abort(name)
        each.aborted = True
        while each.answer.finish_reason is None:
            self._step()
        done = each.known + each.answer.token_ids
        if each.answer.finish_reason != "abort" or len(done) >= each.request.params.max_tokens:
            return
        self.names += 1
        again = msgspec.structs.replace(each.request, request_id=f"r{self.names}", resume_ids=done)
        self._submit(again, 1 - each.engine)
        self.counts.failovers += 1

    def _restart(self, which: int) -> None:
        """A replica dies with everything it has on the device; its requests are lost."""
        if any(self.asked[name].engine == which for name in self._open()):
            return
        self.below.lose(which)
        gone = self.engines[which].stats().cache
        self.tips_lost_by_replaced += gone.lost_tips
        self.lost_by_replaced += sum(gone.spill_failures.values())
        self.engines[which] = self._start(which)
        before = self.taps[which].seen
        self.taps[which] = tap(self.engines[which])
        self.taps[which].seen = before
        self.counts.restarts += 1

    def _finish(self) -> None:
        deadline = time.monotonic() + STALL_S
        for _ in range(MOST_STEPS):
            if not self._open() and not any(engine.has_work for engine in self.engines):
                break
            self._step()
            if self._open() and not any(engine.has_work for engine in self.engines):
                if time.monotonic() > deadline:
                    raise Mismatch(f"stalled: {[engine.stats() for engine in self.engines]}")
                if self.below.threads:
                    wait_for(self.wake)
        else:
            raise Mismatch(f"no end: {[engine.stats() for engine in self.engines]}")
        for engine in self.engines:
            check_books(engine)
            stats = engine.stats()
            assert (stats.running, stats.waiting, stats.cache.loading) == (0, 0, 0)
            assert (stats.pages_free, stats.slots_free) == (stats.pages_total, stats.slots_total)
            assert isinstance(engine.cache, StateCache)
            engine.cache.device.check()
        self.below.check()
        stats = [engine.stats().cache for engine in self.engines]
        assert not any(one.spilled_bytes for one in stats)
        failures = sum(sum(one.spill_failures.values()) for one in stats)
        self.counts.lost = self.lost_by_replaced + failures
        self.counts.spilled = self.files.written

    def close(self) -> None:
        self.below.close()

    # --- what must be true ------------------------------------------------------------------------

    def _check(self, name: str, each: Asked) -> None:
        prompt, answer = each.request.prompt_ids, each.known + each.answer.token_ids
        reason, error = each.answer.finish_reason, each.answer.error or ""
        # Who has lost its old pages and finds no room but on the disk says so; another may resume.
        gone = error.startswith("old pages on disk are lost")
        if reason not in ("length", "abort") or (reason == "abort" and not each.aborted | gone):
            raise Mismatch(f"{name} ended with {reason}: {error}")
        paths = self._paths(each)
        if len(paths) == 1 and not each.stood:
            self._check_cached(name, each)
        if not answer:
            return
        seen = next((tap.seen[name] for tap in self.taps if name in tap.seen), {})
        rows = {at: seen[len(prompt) + at] for at in range(len(each.known), len(answer))}
        self.counts.rows += len(rows)
        for path in paths:
            expected = self.oracle.expect(path, answer)
            if all(row == expected[at] and row.best == answer[at] for at, row in rows.items()):
                break
        else:
            path = self._after_loss(paths, answer, rows)
        if not path:
            how = each.request.session or each.request.kv_mode
            raise Mismatch(
                f"{name} ({how}): {each.cached} of {len(prompt)} prompt tokens were cached: logits "
                f"{rows}, alone they are {self.oracle.expect(paths[0], answer)}"
            )
        self.counts.continued += len(path) > 1
        if reason != "length":
            return
        if each.request.session:
            done = (*path, Piece("answer", tuple(answer[:-1])))
            self.sessions[each.request.session] = (prompt + answer, [*each.stood, done])
        elif not each.request.kv_mode:
            self.past.append((each.request.tenant, prompt, answer))
            del self.past[:-16]

    def _tips_lost(self) -> int:
        return self.tips_lost_by_replaced + sum(e.cache.stats().lost_tips for e in self.engines)

    def _after_loss(
        self, paths: list[tuple[Piece, ...]], answer: list[int], rows: dict[int, Row]
    ) -> tuple[Piece, ...]:
        """The path of a session that was preempted and then could not begin from its state again:
        from there on its prompt is as any other. () where that explains nothing."""
        if self._tips_lost() == self.tips_lost_before:
            return ()
        plain = (Piece("prompt", tuple(t for piece in paths[0] for t in piece.tokens)),)
        later = self.oracle.expect(plain, answer)
        for path in paths:
            first = self.oracle.expect(path, answer)
            turn = next((at for at in rows if rows[at] != first[at]), 0)
            if all(row == (first if at < turn else later)[at] for at, row in rows.items()):
                return plain
        return ()

    def _paths(self, each: Asked) -> list[tuple[Piece, ...]]:
        """How the prompt may have been computed, by what was cached of it: all at once, or from
        where its session stood after one of its turns. On the grid that state may be behind what
        was cached: others have gone on from there with the same tokens."""
        prompt, paths = each.request.prompt_ids, list[tuple[Piece, ...]]()
        on_grid = each.cached % PAGE_TOKENS == 0 or each.within_answer
        for stood in each.stood:
            at = sum(len(piece.tokens) for piece in stood)
            if at == each.cached or (on_grid and at < each.cached):
                paths.append((*stood, Piece("prompt", tuple(prompt[at:]))))
        if on_grid:
            paths.append((Piece("prompt", tuple(prompt)),))
        if not paths:
            raise Mismatch(f"{each.request}: {each.cached} tokens are nobody's state")
        return paths

    def _check_cached(self, name: str, each: Asked) -> None:
        """What is reported as cached is whole pages that this tenant has used before, or the whole
        prompt of an answer that goes on."""
        ids = each.request.prompt_ids
        most = 0
        for owner, other in self.seen[each.request.tenant]:
            if owner != name:
                most = max(most, _common(ids, other))
        del self.seen[each.request.tenant][:-400]
        to_run = 0 if each.known else 1  # the row that its first token is drawn from
        bound = min(most, len(ids) - to_run) // PAGE_TOKENS * PAGE_TOKENS
        whole = each.within_answer and most == len(ids)
        if not whole and (each.cached % PAGE_TOKENS or each.cached > bound):
            raise Mismatch(f"{name}: {each.cached} of {len(ids)} tokens cached, at most {bound}")
        self.counts.cached_tokens += each.cached
        self.counts.prompt_tokens += len(ids)


def _common(a: list[int], b: list[int]) -> int:
    """Length of the common beginning."""
    end = min(len(a), len(b))
    for at in range(0, end, PAGE_TOKENS):
        if a[at : at + PAGE_TOKENS] != b[at : at + PAGE_TOKENS]:
            return at
    return end
