"""What reading little costs: recall against the share of the latents that stays resident."""

from collections.abc import Callable, Sequence

from expertmesh.actors.state.settings import StateSettings
from expertmesh.deploy.eval.cases import Maker
from expertmesh.deploy.eval.longcontext import Cell, Plan, evaluate
from expertmesh.deploy.eval.reading import Mode
from expertmesh.deploy.eval.subject import Subject

TASKS = ("words", "multikey", "returning")
WINDOW = 256
PAGES = (1, 4, 16, 64)


def recall(
    subject: Subject,
    maker: Maker,
    lengths: Sequence[int],
    probes: int,
    told: Callable[[str], None] = lambda line: None,
    tasks: Sequence[str] = TASKS,
    window: int = WINDOW,
) -> list[Cell]:
    """Reading everything, nothing old, and `select` with more and more pages, on the same
    questions. window: last tokens that stay on the device."""
    modes = [Mode("exact"), Mode("blind", "blind", StateSettings(window_tokens=window))]
    for pages in PAGES:
        state = StateSettings(window_tokens=window, select_pages=pages)
        modes.append(Mode(f"select {pages}", "select", state))
    return evaluate(subject, maker, Plan(tasks, lengths, modes, probes), told)
