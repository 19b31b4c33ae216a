"""The long-context tests by name (kv-state 3.10)."""

from collections.abc import Callable
from random import Random

from expertmesh.deploy.eval import needles, tables, wholes
from expertmesh.deploy.eval.cases import Case, Maker
from expertmesh.deploy.exit_codes import ExitCode, Refused

Task = Callable[[Maker, Random, int], Case]

TASKS: dict[str, Task] = {
    "single": needles.single,
    "multikey": needles.multikey,
    "words": needles.words_asked,
    "multiquery": needles.multiquery,
    "multivalue": needles.multivalue,
    "distractors": needles.distractors,
    "tracing": tables.tracing,
    "mqar": tables.mqar,
    "frequent": wholes.frequent,
    "kept": wholes.kept,
    "returning": wholes.returning,
}


def check_tasks(names: list[str]) -> None:
    """Raises Refused for one that there is not."""
    for name in names:
        if name not in TASKS:
            raise Refused(ExitCode.USAGE, f"no task {name!r}", f"there are {', '.join(TASKS)}")


def make(task: str, maker: Maker, length: int, number: int, seed: int) -> Case:
    """Case `number` of a task: the same everywhere and in every mode."""
    return TASKS[task](maker, Random(f"{seed} {task} {length} {number}"), length)
