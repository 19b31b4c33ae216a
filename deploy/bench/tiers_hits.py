"""What a prefix that is still known saves, by length and by the tier that has it (goal G5)."""

import os
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from expertmesh.actors.attention.engine import Engine
from expertmesh.actors.attention.settings import EngineSettings
from expertmesh.actors.model.batch import PAGE_TOKENS
from expertmesh.actors.state.cache import StateCache
from expertmesh.actors.state.pages import pages_for
from expertmesh.actors.state.settings import StateSettings
from expertmesh.deploy.eval.driver import Driver, Timed
from expertmesh.deploy.eval.subject import Subject

STEP_TOKENS = 1024
LEAST_BYTES = 256 << 20


class Hit(msgspec.Struct, frozen=True, kw_only=True):
    """Time to the first token of one length from one tier, over all trials.

    median_s, p99_s: of hits; recompute_s, recompute_p99_s: without any cache, over cold_trials.
    ratio: recompute_s / median_s. slower: share of all pairs of a hit and a recomputation in which
    the hit took longer; 0.5 where they are alike. cpu_s, recompute_cpu_s: medians of what this
    process computed up to the first token; cpu_ratio: of these, which bears other programs on the
    machine better. cached_tokens: not computed again; 0 where computing was the sooner choice.
    read_bytes, read_s, verify_s: of the tier below the device, per trial, packed. same_token: as
    without any cache.
    """

    tokens: int
    tier: str
    trials: int
    median_s: float
    p99_s: float
    cold_trials: int
    recompute_s: float
    recompute_p99_s: float
    ratio: float
    slower: float
    cpu_s: float
    recompute_cpu_s: float
    cpu_ratio: float
    cached_tokens: int
    read_bytes: int
    read_s: float
    verify_s: float
    same_token: bool


def hits(
    subject: Subject,
    lengths: Sequence[int],
    trials: int,
    folder: Path,
    told: Callable[[str], None] = lambda line: None,
    cold_trials: int | None = None,
) -> list[Hit]:
    """folder: for the disk tier; empty. cold_trials: how often each length is computed again, which
    takes the longer the longer it is; by default as often as it is hit."""
    found: list[Hit] = []
    for tokens in lengths:
        prompt = subject.random_prompt(f"hit {tokens}", tokens)
        cold = _recompute(subject, prompt, cold_trials or trials)
        own = folder / str(tokens)
        for tier, times, read in _tiers(subject, prompt, trials, own):
            found.append(_hit(tokens, tier, times, cold, read))
            told(_line(found[-1]))
    return found


class _Read(msgspec.Struct):
    """Sums of one tier's counters."""

    bytes: int = 0
    seconds: float = 0.0
    verify: float = 0.0


def _recompute(subject: Subject, prompt: list[int], trials: int) -> list[Timed]:
    none = StateSettings(prefix_cache=False, host_bytes=0)
    with subject.engine(_settings(prompt, none)) as engine:
        _warm(subject, engine)
        return [Driver(engine).one(prompt, 1) for _ in range(trials)]


def _warm(subject: Subject, engine: Engine) -> None:
    """What an engine's first step takes is no request's."""
    Driver(engine).one(subject.random_prompt("warm", PAGE_TOKENS), 1)


def _tiers(
    subject: Subject, prompt: list[int], trials: int, folder: Path
) -> list[tuple[str, list[Timed], _Read]]:
    """hot: still on the device. host: dropped there. disk: read by a new engine from a folder that
    the system has not cached."""
    room = 4 * (pages_for(len(prompt)) * subject.page_bytes + 4 * subject.slot_bytes)
    host = StateSettings(host_bytes=room)
    found = []
    with subject.engine(_settings(prompt, host)) as engine:
        driver = Driver(engine)
        driver.one(prompt, 1)
        found.append(("hot", [driver.one(prompt, 1) for _ in range(trials)], _Read()))
        times, before = [], _read(engine, "host")
        for _ in range(trials):
            _evict(engine)
            times.append(driver.one(prompt, 1))
        found.append(("host", times, _since(before, _read(engine, "host"))))
    disk = StateSettings(host_bytes=room, disk=folder, disk_bytes=max(LEAST_BYTES, 2 * room))
    with subject.engine(_settings(prompt, disk)) as engine:
        for _ in range(2):  # what is wanted twice goes on to the disk
            Driver(engine).one(prompt, 1)
            _evict(engine)
    times, total = [], _Read()
    for _ in range(trials):
        forget_files(folder)
        with subject.engine(_settings(prompt, disk)) as engine:
            _warm(subject, engine)
            times.append(Driver(engine).one(prompt, 1))
            read = _read(engine, "disk")
            total = _Read(total.bytes + read.bytes, total.seconds + read.seconds,
                          total.verify + read.verify)  # fmt: skip
    return [*found, ("disk", times, total)]


def _settings(prompt: list[int], state: StateSettings) -> EngineSettings:
    pages = 2 * pages_for(len(prompt)) + 4
    return EngineSettings(pages=pages, slots=2, step_tokens=STEP_TOKENS, state=state)


def _read(engine: Engine, tier: str) -> _Read:
    stats = engine.stats().cache.store
    one = stats.host if tier == "host" else stats.disk
    return _Read(one.read_bytes, one.read_seconds, one.verify_seconds)


def _since(before: _Read, now: _Read) -> _Read:
    return _Read(now.bytes - before.bytes, now.seconds - before.seconds, now.verify - before.verify)


def _hit(tokens: int, tier: str, times: list[Timed], cold: list[Timed], read: _Read) -> Hit:
    seconds, cold_s = [one.first_s for one in times], [one.first_s for one in cold]
    median, again, n = statistics.median(seconds), statistics.median(cold_s), len(times)
    return Hit(
        tokens=tokens, tier=tier, trials=n, median_s=median, p99_s=_p99(seconds),
        cold_trials=len(cold), recompute_s=again, recompute_p99_s=_p99(cold_s),
        ratio=again / median, slower=slower(seconds, cold_s), cpu_s=_cpu(times),
        recompute_cpu_s=_cpu(cold),
        cached_tokens=min(one.cached_tokens for one in times), read_bytes=read.bytes // n,
        read_s=read.seconds / n, verify_s=read.verify / n,
        cpu_ratio=_cpu(cold) / _cpu(times),
        same_token=all(one.ids == cold[0].ids for one in times),
    )  # fmt: skip


def slower(first: Sequence[float], second: Sequence[float]) -> float:
    """Share of pairs in which the first is longer, half of those that are equal included."""
    longer = sum((a > b) + (a == b) / 2 for a in first for b in second)
    return longer / (len(first) * len(second))


def _line(one: Hit) -> str:
    return (
        f"{one.tier} {one.tokens}: {one.ratio:.1f} times as fast as computed again, slower in "
        f"{one.slower:.0%} of pairs"
    )


def _p99(seconds: Sequence[float]) -> float:
    return sorted(seconds)[min(len(seconds) - 1, int(0.99 * len(seconds)))]


def _cpu(times: list[Timed]) -> float:
    return statistics.median(one.first_cpu_s for one in times)


def _evict(engine: Engine) -> None:
    assert isinstance(engine.cache, StateCache)
    engine.cache.evict()


def forget_files(folder: Path) -> None:
    """Asks the system to drop what it has cached of these files, so that a read is a read."""
    for path in folder.rglob("*"):
        if path.is_file():
            number = os.open(path, os.O_RDONLY)
            try:
                os.fdatasync(number)
                os.posix_fadvise(number, 0, 0, os.POSIX_FADV_DONTNEED)
            finally:
                os.close(number)
