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
from expertmesh.deploy.bench.tiers_hits import LEAST_BYTES, forget_files
from expertmesh.deploy.eval.driver import Driver, Timed
from expertmesh.deploy.eval.subject import Subject

STEP_TOKENS = 512
QUESTION_TOKENS = 48
Answers = list[list[int]]
# What the first answers is what the others' answers are held against.
SYSTEMS = ("hot", "recompute", "hot+host", "hot+host+disk")
# Of the prefixes' state, what host memory has room for where there is a disk.
HOST_SHARE = 0.1


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
    packed, per generated token. same: share of answers that are the ones of `hot`, token by token;
    1, for nothing here is an estimate."""

    system: str
    clients: int
    requests: int
    tokens_per_s: float
    first_p50_s: float
    first_p99_s: float
    same: float
    hits: dict[str, float]
    read_bytes: dict[str, float]


def loads(
    subject: Subject, work: Work, folder: Path, told: Callable[[str], None] = lambda line: None
) -> list[Load]:
    """folder: for the disk tier; empty. Every system answers the same requests in the same order
    after every prefix has been asked about twice. The system with a disk is started again in
    between, so that it finds everything on the disk and nothing above; its host memory has room for
    HOST_SHARE of it, and before each number of clients the system forgets what it has cached of
    the files."""
    found: list[Load] = []
    expected: dict[int, Answers] = {}
    for system in SYSTEMS:
        settings = _settings(subject, system, work, folder)
        with subject.engine(settings) as engine:
            if system != "recompute":
                for number in range(2):
                    Driver(engine).all(_each(subject, work, number), 1, 1)
            if settings.state.disk is None:
                found += _measured(subject, engine, system, work, expected, told)
        if settings.state.disk is not None:
            with subject.engine(_above_a_disk(subject, settings, work), 0) as engine:
                found += _measured(subject, engine, system, work, expected, told)
    return found


def _measured(
    subject: Subject, engine: Engine, system: str, work: Work, expected: dict[int, Answers],
    told: Callable[[str], None],
) -> Iterator[Load]:  # fmt: skip
    """expected: by the number of clients; filled by the first system."""
    driver, disk = Driver(engine), engine.settings.state.disk
    for clients in work.clients:
        if disk is not None:
            forget_files(disk)
        before = engine.stats().cache
        done = driver.all(_drawn(subject, work, clients), work.answer, clients)
        now = engine.stats().cache
        right = expected.setdefault(clients, [one.ids for one in done])
        one = _load(system, clients, done, right, before, now)
        told(f"{system}, {clients} clients: {one.tokens_per_s:.0f} tokens/s")
        yield one


def _load(
    system: str, clients: int, done: list[Timed], right: Answers,
    before: CacheStats, now: CacheStats,
) -> Load:  # fmt: skip
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
        same=statistics.fmean(one.ids == ids for one, ids in zip(done, right, strict=True)),
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
    everything = 2 * _stored(subject, work)  # and what their questions add
    state = StateSettings(prefix_cache=False, host_bytes=0)
    if system == "hot":
        state = StateSettings(host_bytes=0, snapshots=snapshots)
    elif system == "hot+host":
        state = StateSettings(host_bytes=everything, snapshots=snapshots)
    elif system == "hot+host+disk":
        state = StateSettings(
            host_bytes=everything, snapshots=snapshots, disk=folder,
            disk_bytes=max(LEAST_BYTES, 4 * everything),
        )  # fmt: skip
    return EngineSettings(pages=pages, slots=most, step_tokens=STEP_TOKENS, state=state)


def _above_a_disk(subject: Subject, settings: EngineSettings, work: Work) -> EngineSettings:
    """The same with the host memory that it is measured with: else that soon has everything."""
    host = {"host_bytes": int(HOST_SHARE * _stored(subject, work))}
    return settings.model_copy(update={"state": settings.state.model_copy(update=host)})


def _stored(subject: Subject, work: Work) -> int:
    """Bytes of the prefixes' state, not packed."""
    each = pages_for(work.context) * subject.page_bytes + 2 * subject.slot_bytes
    return work.prefixes * each


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
