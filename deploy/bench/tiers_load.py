"""Throughput and time to the first token against concurrency, by how far down the state of shared
prefixes is kept."""

import random
import statistics
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import msgspec

from expertmesh.actors.attention.engine import Engine
from expertmesh.actors.attention.settings import EngineSettings
from expertmesh.actors.state.pages import pages_for
from expertmesh.actors.state.settings import StateSettings
from expertmesh.actors.state.stats import CacheStats
from expertmesh.deploy.eval.driver import Driver, Timed
from expertmesh.deploy.eval.subject import Subject

STEP_TOKENS = 512
QUESTION_TOKENS = 48
SYSTEMS = ("recompute", "hot", "hot+host", "hot+host+disk")


class Work(msgspec.Struct, frozen=True, kw_only=True):
    """prefixes: texts of `context` tokens, asked in a drawn order, `requests` times in all for each
    number of clients; each answer has `answer` tokens. With tiers the device has room for as many
    prefixes as the most clients, which should be few of them."""

    prefixes: int = 24
    context: int = 1024
    requests: int = 24
    answer: int = 16
    clients: Sequence[int] = (1, 4, 8)


class Load(msgspec.Struct, frozen=True, kw_only=True):
    """hits: share of prompt tokens not computed again, by tier. read_bytes: from the tiers below,
    packed, per generated token."""

    system: str
    clients: int
    requests: int
    tokens_per_s: float
    first_p50_s: float
    first_p99_s: float
    hits: dict[str, float]
    read_bytes: dict[str, float]


def loads(
    subject: Subject, work: Work, folder: Path, told: Callable[[str], None] = lambda line: None
) -> list[Load]:
    """folder: for the disk tier; empty. Every system answers the same requests in the same order
    after every prefix has been asked about twice. The system with a disk is started again in
    between, so that it finds everything on the disk and nothing above."""
    found: list[Load] = []
    for system in SYSTEMS:
        settings = _settings(subject, system, work, folder)
        with subject.engine(settings) as engine:
            if system != "recompute":
                for number in range(2):
                    Driver(engine).all(_each(subject, work, number), 1, 1)
            if settings.state.disk is None:
                found += _measured(subject, engine, system, work, told)
        if settings.state.disk is not None:
            with subject.engine(settings) as engine:
                found += _measured(subject, engine, system, work, told)
    return found


def _measured(
    subject: Subject, engine: Engine, system: str, work: Work, told: Callable[[str], None]
) -> Iterator[Load]:
    driver = Driver(engine)
    for clients in work.clients:
        before = engine.stats().cache
        done = driver.all(_drawn(subject, work, clients), work.answer, clients)
        one = _load(system, clients, done, before, engine.stats().cache)
        told(f"{system}, {clients} clients: {one.tokens_per_s:.0f} tokens/s")
        yield one


def _load(
    system: str, clients: int, done: list[Timed], before: CacheStats, now: CacheStats
) -> Load:
    seconds = max(one.asked + one.last_s for one in done) - min(one.asked for one in done)
    first = sorted(one.first_s for one in done)
    tokens = sum(len(one.ids) for one in done)
    queries = now.queries - before.queries
    read = {
        "host": now.store.host.read_bytes - before.store.host.read_bytes,
        "disk": now.store.disk.read_bytes - before.store.disk.read_bytes,
    }
    return Load(
        system=system, clients=clients, requests=len(done), tokens_per_s=tokens / seconds,
        first_p50_s=statistics.median(first),
        first_p99_s=first[min(len(first) - 1, int(0.99 * len(first)))],
        hits={
            tier: (count - before.hits_by_tier.get(tier, 0)) / queries
            for tier, count in now.hits_by_tier.items()
        },
        read_bytes={tier: size / tokens for tier, size in read.items()},
    )  # fmt: skip


def _settings(subject: Subject, system: str, work: Work, folder: Path) -> EngineSettings:
    """hot has device pages for every prefix; the systems with tiers only for what runs."""
    per_prefix = pages_for(work.context)
    per_request = pages_for(QUESTION_TOKENS + work.answer) + 2
    most = max(work.clients)
    running = most * (per_prefix + per_request)
    pages = running + (work.prefixes * per_prefix if system == "hot" else 0)
    snapshots = 2 * work.prefixes if system == "hot" else 2
    prefix_bytes = per_prefix * subject.page_bytes + 2 * subject.slot_bytes
    everything = 2 * work.prefixes * prefix_bytes
    state = StateSettings(prefix_cache=False, host_bytes=0)
    if system == "hot":
        state = StateSettings(host_bytes=0, snapshots=snapshots)
    elif system == "hot+host":
        state = StateSettings(host_bytes=everything, snapshots=snapshots)
    elif system == "hot+host+disk":
        state = StateSettings(
            host_bytes=everything, snapshots=snapshots, disk=folder,
            disk_bytes=max(256 << 20, 4 * everything),
        )  # fmt: skip
    return EngineSettings(pages=pages, slots=most, step_tokens=STEP_TOKENS, state=state)


def _asked(subject: Subject, work: Work, number: int, question: str) -> list[int]:
    prefix = subject.random_prompt(f"prefix {number}", work.context)
    return prefix + subject.random_prompt(f"question {question}", QUESTION_TOKENS)


def _each(subject: Subject, work: Work, question: int) -> Iterator[list[int]]:
    for number in range(work.prefixes):
        yield _asked(subject, work, number, f"before {question}")


def _drawn(subject: Subject, work: Work, clients: int) -> Iterator[list[int]]:
    """A prefix, not always equally often, and a question of its own."""
    rng = random.Random(f"load {clients}")
    for at in range(work.requests):
        yield _asked(subject, work, rng.randrange(work.prefixes), f"{clients} {at}")
