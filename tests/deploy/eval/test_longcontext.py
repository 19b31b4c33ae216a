"""The command: cells, the gate, files, and refusals."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from expertmesh.deploy.cli import app
from expertmesh.deploy.eval import report
from expertmesh.deploy.eval.asking import Answer, Answers, Judged
from expertmesh.deploy.eval.cases import Maker
from expertmesh.deploy.eval.curves import plot_curves
from expertmesh.deploy.eval.filler import Noise
from expertmesh.deploy.eval.longcontext import Cell, Plan, cells, evaluate
from expertmesh.deploy.eval.plots import plot_depths, plot_recall
from expertmesh.deploy.eval.reading import Held, Mode, Reads
from expertmesh.deploy.eval.subject import Subject

PNG = b"\x89PNG\r\n\x1a\n"


def run(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["eval", "longcontext", *arguments])


def answered(
    rights: list[bool], reads: Reads = "exact", depth: float = 0.5, share: float = 1.0
) -> Answers:
    """Two questions a text; a wrong answer is another token, less likely."""
    answers = [
        Answer(at // 2, depth, (Judged(2, 2 if right else 0, 0.5, 0.0 if right else 0.25),))
        for at, right in enumerate(rights)
    ]
    return Answers(Mode(reads, reads), answers, Held(int(share * 1000), 0, 0, 0, 0, 1000))


def test_a_cell_counts_texts_questions_depths_and_changes() -> None:
    full = answered([True] * 39 + [False], depth=0.99)
    worse = answered([True] * 38 + [False] * 2, "select", depth=0.99, share=0.25)
    first, second = cells("t", 512, [full, worse])
    assert (first.texts, first.recall.right, first.recall.n) == (20, 39, 40)
    assert first.judged and second.judged and first.loss is None and second.loss is not None
    assert (second.loss.lost, second.loss.points) == (1, 2.5)
    assert first.depths == [(0, 0)] * 4 + [(39, 40)] and first.nats == 0.5
    assert first.same.share == 1 and second.same.right == 39
    assert second.divergence == pytest.approx(2 * 0.25 / 40)
    assert (first.share, second.share) == (1.0, 0.25)
    assert first.needs is first.needs_tokens is None  # nobody was blind


def test_questions_that_need_latents_are_those_that_who_reads_nothing_old_gets_wrong() -> None:
    full = answered([True] * 6 + [False] * 4)
    blind = answered([True] * 2 + [False] * 7 + [True], "blind")
    near = answered([False] + [True] * 4 + [False] * 5, "select")
    first, control, second = cells("t", 512, [full, blind, near])
    for one in (first, control, second):
        assert one.needs is not None and one.needs.n == 4
        # The last answer as well: another token than the first mode's, right or not.
        assert one.needs_tokens is not None and one.needs_tokens.n == 5
    assert first.needs is not None and first.needs.share == 1
    assert control.needs is not None and control.needs.right == 0
    assert second.needs is not None and second.needs.right == 3
    assert second.needs_tokens is not None and second.needs_tokens.right == 4


def test_what_the_first_mode_hardly_knows_is_not_judged() -> None:
    assert not cells("t", 512, [answered([True] * 18 + [False] * 2)])[0].judged


def test_modes_get_the_same_questions_and_those_that_keep_everything_answer_the_same(
    subject: Subject, maker: Maker
) -> None:
    modes = [Mode("one"), Mode("two")]
    told: list[str] = []
    one, two = evaluate(subject, maker, Plan(["single"], [256], modes, 1), told.append)
    assert one.recall.n == 1 and one.recall == two.recall and one.nats == two.nats > 0
    assert two.loss is not None and two.loss.lost == two.loss.gained == 0
    assert "text 1, 1 questions of 1" in told[0] and "single at 256, two" in told[2]


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
    for name in ("recall.png", "depths.png", "curves.png"):
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


def test_select_is_read_with_each_number_of_pages(
    wordy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plans: list[Plan] = []

    def nothing(subject: Subject, maker: Maker, plan: Plan, *rest: object) -> list[Cell]:
        plans.append(plan)
        return []

    monkeypatch.setattr(report, "evaluate", nothing)
    done = run("--model", str(wordy), "--pages", "9", "--pages", "2", "--window", "128", "--json")
    assert done.exit_code == 0, done.output
    found = [
        (one.name, one.reads, one.state.select_pages)
        for one in plans[0].modes
        if one.name != "exact"
    ]
    assert found[:2] == [("select 2", "select", 2), ("select 9", "select", 9)]
    assert found[2][:2] == ("blind", "blind")
    assert all(one.state.window_tokens == 128 for one in plans[0].modes)


def test_what_is_printed_is_whole(capsys: pytest.CaptureFixture[str]) -> None:
    found = cells("distractors", 131_072, [
        answered([True] * 40), answered([True] * 30 + [False] * 10, "select", share=0.125),
        answered([True] * 20 + [False] * 20, "blind"),
    ])  # fmt: skip
    report.print_cells(found)
    printed, loss = capsys.readouterr().out, found[1].loss
    assert loss is not None
    points = f"+25.0 ({loss.low:+.1f} to {loss.high:+.1f})"
    for said in ("distractors", "131072", "30/40", "60%-86%", points, "75.0%", "12.5%", "10/20"):
        assert said in printed


def test_plots_of_many_cells(tmp_path: Path) -> None:
    found: list[Cell] = []
    for task in "abcdef":  # more than stand in a row
        for length in (512, 4096):
            full = answered([True, False, True], depth=0.1)
            every, none = answered([True] * 3, "select", share=0.3), answered([False] * 3, "blind")
            found += cells(task, length, [full, every, none])
    plot_recall(found, tmp_path / "recall.png")
    plot_depths([one for one in found if one.task == "a"], tmp_path / "depths.png")
    plot_curves([one for one in found if one.task in "ab"], tmp_path / "curves.png")
    for name in ("recall.png", "depths.png", "curves.png"):
        assert (tmp_path / name).stat().st_size > 10_000


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
