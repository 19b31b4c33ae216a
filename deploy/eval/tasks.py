"""The long-context tests by name (kv-state 3.10)."""

from collections.abc import Callable
from random import Random

from expertmesh.deploy.eval import needles, tables, wholes
from expertmesh.deploy.eval.cases import Case, Maker

Task = Callable[[Maker, Random, int], Case]

TASKS: dict[str, Task] = {
    "single": needles.single,
    "multikey": needles.multikey,
    "multiquery": needles.multiquery,
    "multivalue": needles.multivalue,
    "distractors": needles.distractors,
    "tracing": tables.tracing,
    "mqar": tables.mqar,
    "frequent": wholes.frequent,
    "kept": wholes.kept,
    "returning": wholes.returning,
}


def make(task: str, maker: Maker, length: int, number: int, seed: int) -> Case:
    """Case `number` of a task: the same everywhere and in every mode."""
    return TASKS[task](maker, Random(f"{seed} {task} {length} {number}"), length)
