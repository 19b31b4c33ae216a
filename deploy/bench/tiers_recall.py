"""What reading little costs: recall against the share of the latents that stays resident."""

from collections.abc import Callable, Sequence

import msgspec

from expertmesh.actors.state.pages import pages_for
from expertmesh.actors.state.settings import Codec, StateSettings
from expertmesh.deploy.bench.tiers_resident import Resident
from expertmesh.deploy.eval.asking import Answer
from expertmesh.deploy.eval.cases import Maker
from expertmesh.deploy.eval.longcontext import Cell, Mode, Plan, answer, cell
from expertmesh.deploy.eval.subject import Subject

TASKS = ("single", "multikey", "kept", "frequent", "returning")

# (window_tokens, select_pages, codec): what is not read exactly is taken from a sketch on the
# device, or, with int8 and int4, from rows in host memory.
Setting = tuple[int, int, Codec]
SETTINGS: tuple[Setting, ...] = ((256, 4, "lossless"), (1024, 16, "lossless"), (256, 4, "int4"))


class Point(msgspec.Struct, frozen=True, kw_only=True):
    """One task at one length with one setting of `select`; pages is 0 where nothing old is read,
    and window the length where everything is.

    share: resident bytes of a sequence that answers (near pages, sketches, old pages of late
    steps), over its latents in full. scratch: the engine's, beside them, over the same. read_pages:
    exactly read, per step and layer.
    """

    window: int
    pages: int
    share: float
    scratch: float
    resident: int
    read_pages: float
    cell: Cell


def recall(
    subject: Subject,
    maker: Maker,
    lengths: Sequence[int],
    probes: int,
    told: Callable[[str], None] = lambda line: None,
    settings: Sequence[Setting] = SETTINGS,
    tasks: Sequence[str] = TASKS,
) -> list[Point]:
    """Each of the settings, and reading nothing old, compared with reading everything on the same
    questions; the first point of a task and length is of that."""
    points = []
    exact = Mode("exact", "exact", StateSettings(prefix_cache=True))
    for length in lengths:
        plan = Plan(tasks, [length], [], probes)
        for task in tasks:
            full = answer(subject, maker, exact, task, length, plan)
            points.append(
                Point(
                    window=length, pages=0, share=1.0, scratch=0.0,
                    resident=pages_for(length) * subject.page_bytes, read_pages=0.0,
                    cell=cell(task, length, "exact", full, full),
                )
            )  # fmt: skip
            for window in sorted({window for window, _, _ in settings}):
                state = StateSettings(window_tokens=window)
                mode = Mode(f"blind {window}", "exact", state, blind=True)
                answers = answer(subject, maker, mode, task, length, plan)
                points.append(_blind(subject, window, answers, full, task, length))
            for window, pages, codec in settings:
                state = StateSettings(window_tokens=window, select_pages=pages, codec=codec)
                mode = Mode(f"select {window}+{pages} {codec}", "select", state)
                most = Resident()
                answers = answer(subject, maker, mode, task, length, plan, most.look)
                own = cell(task, length, mode.name, answers, full)
                points.append(_point(subject, state, most, answers, own))
            for point in points[-len(settings) :]:
                told(_line(point))
    return points


def _blind(
    subject: Subject, window: int, answers: list[Answer], full: list[Answer], task: str, length: int
) -> Point:
    near = min(length, window + StateSettings().sink_tokens)
    return Point(
        window=window, pages=0, share=near / length, scratch=0.0,
        resident=pages_for(near) * subject.page_bytes, read_pages=0.0,
        cell=cell(task, length, f"blind {window}", answers, full),
    )  # fmt: skip


def _point(
    subject: Subject, state: StateSettings, most: Resident, answers: list[Answer], own: Cell
) -> Point:
    whole = pages_for(own.length) * subject.page_bytes
    steps = sum(len(one.probe.ids) - 1 for one in answers)  # the first token comes of the prompt
    layers = subject.config.num_layers - len(subject.config.kda_layers)
    read = sum(one.kv.read_pages for one in answers if one.kv is not None)
    return Point(
        window=state.window_tokens, pages=state.select_pages, share=most.answering / whole,
        scratch=most.scratch / whole, resident=most.answering,
        read_pages=read / max(1, steps * layers), cell=own,
    )  # fmt: skip


def _line(point: Point) -> str:
    one = point.cell
    assert one.loss is not None
    return (
        f"recall, {one.task} at {one.length}, {one.mode}: {point.share:.1%} resident, "
        f"{one.recall.right}/{one.recall.n}, loses {one.loss.points:+.1f} points, "
        f"{one.divergence:.5f} nats apart"
    )
