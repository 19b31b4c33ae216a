"""Tables whose numbers are whole, wherever they are printed."""

from collections.abc import Iterable

from rich.console import Console
from rich.table import Table

FILE_WIDTH = 160


def report_console() -> Console:
    """For results. A file or a pipe has no width, and rich would take 80 columns."""
    console = Console(highlight=False)
    if console.is_terminal:
        return console
    return Console(highlight=False, width=max(FILE_WIDTH, console.width))


def progress_console() -> Console:
    """For lines about what has been done so far, on stderr; a line stays one."""
    return Console(stderr=True, highlight=False, soft_wrap=True)


def report_table(title: str, names: Iterable[str], left: int) -> Table:
    """Columns after the first `left` stand to the right. Where a terminal is too narrow, cells go
    on in a next line; nothing is cut."""
    table = Table(title=title, title_justify="left")
    for at, name in enumerate(names):
        table.add_column(name, justify="left" if at < left else "right", overflow="fold")
    return table
