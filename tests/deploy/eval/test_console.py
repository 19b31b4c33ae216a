"""What a table says is whole in a file, in a pipe and on a narrow terminal."""

import io

import pytest
from rich.console import Console

from expertmesh.deploy.eval.console import report_console, report_table

CELLS = [f"{at}23456789.{at}" for at in range(9)]


def test_in_a_pipe_no_cell_is_cut_or_broken(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    table = report_table("Nine", [f"column {at}" for at in range(9)], 2)
    table.add_row(*CELLS)
    report_console().print(table)
    printed = capsys.readouterr().out
    assert all(cell in printed for cell in CELLS) and "column 8" in printed


def test_on_a_narrow_terminal_cells_go_on_in_the_next_line() -> None:
    table = report_table("Nine", ["a", "b"], 1)
    table.add_row("c" * 12, "1234567890123")
    file = io.StringIO()
    Console(file=file, width=20, force_terminal=True, color_system=None).print(table)
    assert "…" not in file.getvalue()
    assert sum(map(file.getvalue().count, "0123456789")) == 13
