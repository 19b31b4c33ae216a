"""The command: cells, the gate, files, and refusals."""

import json
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner, Result

from expertmesh.deploy.cli import app
from expertmesh.deploy.eval import report
from expertmesh.deploy.eval.asking import Answer
from expertmesh.deploy.eval.cases import Maker, Probe
from expertmesh.deploy.eval.filler import Noise
from expertmesh.deploy.eval.longcontext import Cell, Mode, Plan, cell, evaluate
from expertmesh.deploy.eval.plots import plot_depths, plot_recall
from expertmesh.deploy.eval.subject import Subject
from expertmesh.deploy.eval.teacher import Judged, Verdict

PNG = b"\x89PNG\r\n\x1a\n"


def run(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["eval", "longcontext", *arguments])


def answered(rights: list[bool], depth: float = 0.5) -> list[Answer]:
    probe = Probe((1, 2), ((1, 2),), depth)
    likely = torch.tensor([0.25, 0.25, 0.5]).log()
    return [
        Answer(at // 2, probe, Verdict([Judged(2, 2 if right else 0, likely)]), 64, None)
        for at, right in enumerate(rights)
    ]


def test_a_cell_counts_texts_questions_depths_and_changes() -> None:
    full = answered([True] * 39 + [False], depth=0.99)
    worse = answered([True] * 38 + [False] * 2, depth=0.99)
    first, second = cell("t", 512, "a", full, full), cell("t", 512, "b", worse, full)
    assert (first.cases, first.recall.right, first.recall.n) == (20, 39, 40)
    assert first.judged and second.judged and first.loss is None and second.loss is not None
    assert (second.loss.lost, second.loss.points) == (1, 2.5)
    assert first.depths == [(0, 0)] * 4 + [(39, 40)] and first.nats == pytest.approx(0.6931472)
    assert first.same.share == 1 and second.same.right == 39 and second.divergence == 0
    assert second.cached_tokens == 40 * 64


def test_what_the_first_mode_hardly_knows_is_not_judged() -> None:
    full = answered([True] * 18 + [False] * 2)
    assert not cell("t", 512, "a", full, full).judged


def test_modes_get_the_same_questions_and_those_that_keep_everything_answer_the_same(
    subject: Subject, maker: Maker
) -> None:
    modes = [Mode("one"), Mode("two")]
    told: list[str] = []
    one, two = evaluate(subject, maker, Plan(["single"], [256], modes, 1), told.append)
    assert one.recall.n == 1 and one.recall == two.recall and one.nats == two.nats > 0
    assert two.loss is not None and two.loss.lost == two.loss.gained == 0
    assert len(told) == 2 and "single at 256, two" in told[1]


def test_the_bundled_model_finds_a_fact_and_the_command_writes_what_it_has_measured(
    tmp_path: Path,
) -> None:
    done = run(
        "--task", "single", "--length", "256", "--mode", "exact", "--probes", "1", "--json",
        "--out", str(tmp_path / "new"),
    )  # fmt: skip
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    (one,) = found["cells"]
    assert one["recall"]["right"] == one["recall"]["n"] == 1
    assert found["conditions"]["filler"] == "prose"
    assert json.loads((tmp_path / "new" / "longcontext.json").read_text()) == found
    for name in ("recall.png", "depths.png"):
        assert (tmp_path / "new" / name).read_bytes().startswith(PNG)


def test_text_is_filled_with_what_is_wished_for(
    wordy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    makers: list[Maker] = []

    def nothing(subject: Subject, maker: Maker, *rest: object) -> list[Cell]:
        makers.append(maker)
        return []

    monkeypatch.setattr(report, "evaluate", nothing)
    assert run("--model", str(wordy), "--filler", "noise", "--json").exit_code == 0
    assert isinstance(makers[0].filler, Noise)


def test_what_is_printed_is_whole(capsys: pytest.CaptureFixture[str]) -> None:
    full, worse = answered([True] * 40), answered([True] * 30 + [False] * 10)
    cells = [cell("distractors", 131_072, "exact", full, full),
             cell("distractors", 131_072, "select", worse, full)]  # fmt: skip
    report.print_cells(cells)
    printed, loss = capsys.readouterr().out, cells[1].loss
    assert loss is not None
    points = f"+25.0 ({loss.low:+.1f} to {loss.high:+.1f})"
    for said in ("distractors", "131072", "30/40", "60%-86%", points, "75.0%"):
        assert said in printed


def test_plots_of_many_cells(tmp_path: Path) -> None:
    cells: list[Cell] = []
    for task in "abcdef":  # more than stand in a row
        for length in (512, 4096):
            full = answered([True, False], depth=0.1) + answered([True], depth=0.9)
            none, every = answered([False] * 3), answered([True] * 3)
            cells += [
                cell(task, length, mode, answers, full)
                for mode, answers in (("exact", full), ("select", every), ("blind", none))
            ]
    plot_recall(cells, tmp_path / "recall.png")
    plot_depths([one for one in cells if one.task == "a"], tmp_path / "depths.png")
    assert (tmp_path / "depths.png").stat().st_size > 10_000


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--task", "nothing"], "no task 'nothing'"),
        (["--mode", "fast"], "kv_mode"),
        (["--window", "100"], "window_tokens"),
        (["--codec", "zip"], "codec"),
        (["--filler", "/no/such/text"], "filler /no/such/text"),
    ],
)
def test_what_cannot_be_measured_is_refused_before_anything_is_loaded(
    arguments: list[str], said: str
) -> None:
    done = run(*arguments)
    assert done.exit_code == 2 and said in done.output


def test_a_folder_without_a_model_is_told(tmp_path: Path) -> None:
    assert run("--model", str(tmp_path / "none")).exit_code == 3
