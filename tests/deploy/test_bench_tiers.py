"""`expertmesh bench tiers`: small runs of every part on a tiny model of random weights."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
from typer.testing import CliRunner, Result

from expertmesh.actors.attention.engine import Engine
from expertmesh.deploy.bench import tiers_load, tiers_memory, tiers_report
from expertmesh.deploy.bench.codec_errors import Errors
from expertmesh.deploy.bench.codecs import Row
from expertmesh.deploy.bench.tiers_hits import hits, slower
from expertmesh.deploy.bench.tiers_load import SYSTEMS, Work, loads
from expertmesh.deploy.bench.tiers_memory import measure
from expertmesh.deploy.bench.tiers_recall import PAGES, recall
from expertmesh.deploy.bench.tiers_report import PARTS, Measured
from expertmesh.deploy.cli import app
from expertmesh.deploy.eval.cases import Maker
from expertmesh.deploy.eval.driver import Driver, EngineEnded, Timed
from expertmesh.deploy.eval.filler import Prose
from expertmesh.deploy.eval.subject import Subject
from tests.support.wordy import write_wordy

PNG = b"\x89PNG\r\n\x1a\n"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_wordy(tmp_path_factory.mktemp("wordy"))


@pytest.fixture(scope="module")
def subject(checkpoint: Path) -> Subject:
    return Subject(checkpoint, 2048)


@pytest.fixture(scope="module")
def measured(
    checkpoint: Path, subject: Subject, tmp_path_factory: pytest.TempPathFactory
) -> Measured:
    """Every part, each as small as can be."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tiers_memory, "MODES", ("exact",))
        memory = tiers_memory.memory(checkpoint, [832])  # in a process of its own
        patch.setattr(tiers_memory, "ANSWER_TOKENS", 8)
        patch.setattr(tiers_memory, "LEAST_PAGES", 4)
        patch.setattr(tiers_memory, "PIECE_TOKENS", 128)
        memory += [measure(subject, mode, 832, 64, 4) for mode in ("offload", "offload+disk")]
    work = Work(prefixes=2, context=128, requests=3, answer=2, clients=(2,))
    folder, maker = tmp_path_factory.mktemp("tiers"), Maker(subject.tokenizer, Prose())
    return Measured(
        memory=memory,
        load=loads(subject, work, folder / "load"),
        hits=hits(subject, [192], 2, folder / "hits", cold_trials=1),
        recall=recall(subject, maker, [512], 1, tasks=["single"], window=64),
        codecs=[row("raw", 32.0, 0.0), row("int8", 8.3, 1e-5), row("int4", 4.3, 4e-3)],
    )


def row(codec: str, bits: float, wrong: float) -> Row:
    """Of a codec that loses so much."""
    errors = dict.fromkeys(Errors.__struct_fields__, wrong)
    rest = {
        field.name: 0 if field.type is int else wrong
        for field in msgspec.structs.fields(Row)
        if field.type in (int, float)
    }
    known = {"codec": codec, "dtype": "float32", "shipped": True, "bits": bits, "errors": errors}
    return msgspec.convert(rest | known | {"exact_bits": None}, Row)


def run(checkpoint: Path, *arguments: str) -> Result:
    return CliRunner().invoke(app, ["bench", "tiers", "--model", str(checkpoint), *arguments])


def test_a_hit_comes_from_its_tier_and_says_the_same(measured: Measured) -> None:
    found = {one.tier: one for one in measured.hits}
    assert list(found) == ["hot", "host", "disk"]
    for one in found.values():
        assert (one.trials, one.cold_trials) == (2, 1)
        assert one.same_token and one.ratio > 0 and one.cpu_ratio > 0 and one.slower in (0, 0.5, 1)
        assert one.median_s <= one.p99_s and one.recompute_s == one.recompute_p99_s
        assert one.cached_tokens in (0, 128)  # on a busy machine computing may look sooner
    assert found["hot"].cached_tokens == 128 and found["hot"].read_bytes == 0
    for tier in ("host", "disk"):
        assert (found[tier].read_bytes > 0) == (found[tier].cached_tokens > 0)


def test_how_often_a_hit_takes_longer_is_counted_over_all_pairs() -> None:
    assert slower([1.0, 2.0], [3.0, 3.0, 4.0]) == 0
    assert slower([1.0, 2.0], [2.0]) == 0.25
    assert slower([5.0], [1.0, 9.0]) == 0.5


def test_every_system_answers_the_same_requests(measured: Measured) -> None:
    found = measured.load
    assert [one.system for one in found] == list(SYSTEMS)
    for one in found:
        assert one.requests == 3 and one.tokens_per_s > 0
        assert 0 < one.first_p50_s <= one.first_p99_s
        assert one.same == 1.0
    hot, again, *_ = found
    assert not again.hits and sum(hot.hits.values()) > 0.5


def test_a_disk_is_measured_below_little_memory_and_cold(
    subject: Subject, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    forgotten, capacities = list[Path](), list[int]()
    whole = Subject.engine

    @contextmanager
    def watched(*arguments: Any) -> Iterator[Engine]:
        with whole(*arguments) as engine:
            capacities.append(engine.stats().cache.store.host.capacity_bytes)
            yield engine

    monkeypatch.setattr(Subject, "engine", watched)
    monkeypatch.setattr(tiers_load, "forget_files", forgotten.append)
    monkeypatch.setattr(tiers_load, "SYSTEMS", ("hot+host+disk",))
    work = Work(prefixes=3, context=128, requests=1, answer=1, clients=(1, 2))
    loads(subject, work, tmp_path)
    stored = 3 * (2 * subject.page_bytes + 2 * subject.slot_bytes)
    filled, little = capacities
    assert filled >= stored and little == max(stored // 10, 2 * subject.slot_bytes)
    assert forgotten == [tmp_path, tmp_path]


def test_what_is_said_otherwise_counts_against_a_system(
    subject: Subject, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers, real = [True, False], Driver.all

    def all_but_one(self: Driver, *arguments: Any) -> list[Timed]:
        done = real(self, *arguments)
        if len(done) == 2 and not answers.pop(0):
            done[0].ids = [-1]
        return done

    monkeypatch.setattr(Driver, "all", all_but_one)
    monkeypatch.setattr(tiers_load, "SYSTEMS", ("hot", "recompute"))
    work = Work(prefixes=1, context=64, requests=2, answer=1, clients=(1,))
    assert [one.same for one in loads(subject, work, tmp_path)] == [1.0, 0.5]


def test_old_pages_leave_the_device_and_are_accounted_for_on_the_host(
    subject: Subject, measured: Measured
) -> None:
    exact, far, disk = measured.memory
    assert (exact.mode, exact.tokens) == ("exact", far.tokens)
    assert exact.share == 1 and exact.host == exact.index == exact.scratch == exact.disk == 0
    assert far.disk == 0 < disk.disk and disk.host <= 4 * subject.page_bytes < far.host
    assert disk.near == far.near and disk.share == far.share and disk.token_s > 0
    assert far.full == exact.full == 14 * subject.page_bytes
    assert far.near + far.host >= far.full and far.share < 0.5 and far.scratch > 0


def test_recall_is_given_with_its_control(measured: Measured) -> None:
    full, blind, *near = measured.recall
    assert full.share == 1 and full.divergence == 0
    assert blind.mode == "blind" and blind.divergence > 0 and blind.share < 0.5
    # So short a text does not leave the device: all is read, and it is the same to the last bit.
    assert [one.mode for one in near] == [f"select {pages}" for pages in PAGES]
    assert all(one.divergence == 0 for one in near)


def test_every_part_has_its_table_and_its_plot(
    checkpoint: Path,
    subject: Subject,
    measured: Measured,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for part in PARTS:
        name = {"load": "loads", "codecs": "frontier"}.get(part, part)
        found = getattr(measured, part)
        monkeypatch.setattr(tiers_report, name, lambda *args, found=found, **kwargs: found)
    done = run(checkpoint, "--out", str(tmp_path / "new"))
    assert done.exit_code == 0, done.output
    for title in ("Memory of one", "Time to the first", "Throughput", "Recall by", "Codecs"):
        assert title in done.output
    assert "…" not in done.output and f"{measured.hits[0].recompute_s * 1e3:.1f}" in done.output
    report = json.loads((tmp_path / "new" / "tiers.json").read_text())
    assert all(one["same"] == 1 for one in report["load"])
    assert all(tiers_report._load(one)["same"] == "100%" for one in measured.load)
    crossover = subject.slot_bytes / subject.page_bytes * 64
    assert report["crossover"][checkpoint.name] == pytest.approx(crossover)
    for part in PARTS:
        assert report[part]
        assert (tmp_path / "new" / f"{part}.png").read_bytes().startswith(PNG)


def test_what_has_been_measured_outlives_a_part_that_fails(
    checkpoint: Path, measured: Measured, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*args: object, **kwargs: object) -> None:
        assert (tmp_path / "memory.png").exists() and (tmp_path / "tiers.json").exists()
        raise EngineEnded("no more")

    monkeypatch.setattr(tiers_report, "memory", lambda *args, **kwargs: measured.memory)
    monkeypatch.setattr(tiers_report, "hits", fails)
    done = run(checkpoint, "--part", "memory", "--part", "hits", "--out", str(tmp_path))
    assert done.exit_code == 1 and "no more" in done.output
    report = json.loads((tmp_path / "tiers.json").read_text())
    assert len(report["memory"]) == len(measured.memory) and report["hits"] == []


def test_lengths_are_computed_again_as_often_as_is_wished_for(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[object, ...]] = []

    def counted(subject: object, *rest: object) -> list[object]:
        asked.append((rest[1], rest[-1]))
        return []

    monkeypatch.setattr(tiers_report, "hits", counted)
    for more in ([], ["--cold-trials", "5"]):
        assert run(checkpoint, "--part", "hits", "--trials", "200", *more).exit_code == 0
    assert asked == [(200, 200), (200, 5)]


def test_parts_are_known_by_name(checkpoint: Path) -> None:
    done = run(checkpoint, "--part", "speed")
    assert done.exit_code == 2 and "no part 'speed'" in done.output
