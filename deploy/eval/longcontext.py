"""Recall over long contexts, mode by mode, on the same questions (kv-state 3.10)."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import msgspec

from expertmesh.actors.attention.engine import Engine
from expertmesh.actors.attention.messages import KvReport
from expertmesh.actors.attention.settings import EngineSettings
from expertmesh.actors.state.pages import pages_for
from expertmesh.actors.state.settings import KvMode, StateSettings
from expertmesh.deploy.eval.asking import Answer, Asker
from expertmesh.deploy.eval.blind import Blind
from expertmesh.deploy.eval.cases import Case, Maker
from expertmesh.deploy.eval.statistics import Loss, Share
from expertmesh.deploy.eval.subject import Subject
from expertmesh.deploy.eval.tasks import make

# What a probe, and the tokens of a chunk that is under way, may need beyond the text.
SPARE_TOKENS = 512
STEP_TOKENS = 1024
SLOTS = 16
FAR_SLOTS = 4  # where every sequence has its own pages
BINS = 5
# Below this there is little to lose: a mode is judged only where everything at hand gets so much.
GATE = 0.95


@dataclass(frozen=True, slots=True)
class Mode:
    """A way to keep old tokens. The first of several is what the others are compared with. blind:
    nothing of old tokens is read at all (see Blind); kv_mode is exact then."""

    name: str
    kv_mode: KvMode = "exact"
    state: StateSettings = field(default_factory=StateSettings)
    blind: bool = False

    @property
    def watch(self) -> Callable[[Engine], None]:
        """To be called after every step of the mode's engine, one object per engine."""
        if self.blind:
            return Blind(self.state.sink_tokens, self.state.window_tokens)
        return lambda engine: None

    def engine_settings(self, length: int) -> EngineSettings:
        """Device pages for what the mode holds on the device, and few more."""
        if self.kv_mode == "exact":
            slots = SLOTS  # which share the text's pages and go on from them on their own
            pages = pages_for(length + SPARE_TOKENS) + slots * pages_for(SPARE_TOKENS)
        else:
            slots = FAR_SLOTS
            tokens = self.state.sink_tokens + self.state.window_tokens + STEP_TOKENS
            pages = slots * (pages_for(tokens) + 2)
        return EngineSettings(
            pages=pages,
            slots=slots,
            step_tokens=STEP_TOKENS,
            state=self.state.model_copy(
                update={"kv_mode": self.kv_mode} | ({"host_bytes": 0} if self.blind else {})
            ),
        )


@dataclass(frozen=True, slots=True)
class Plan:
    tasks: Sequence[str]
    lengths: Sequence[int]
    modes: Sequence[Mode]
    probes: int
    seed: int = 0


class Reading(msgspec.Struct, frozen=True):
    """How a mode read old tokens in one cell: sums and the largest bound over its probes."""

    mode: str
    bits: float
    read_pages: int
    estimated_pages: int
    bound: float
    bound_kind: str

    @staticmethod
    def of(reports: Sequence[KvReport]) -> "Reading | None":
        if not reports:
            return None
        worst = max(reports, key=lambda one: one.bound)
        return Reading(
            worst.mode, worst.bits, sum(one.read_pages for one in reports),
            sum(one.estimated_pages for one in reports), worst.bound, worst.bound_kind,
        )  # fmt: skip


class Cell(msgspec.Struct, frozen=True):
    """One task at one length in one mode.

    cases: texts; n of `recall` counts questions, several per text. judged: whether the first mode
    reaches GATE here. loss: against the first mode, None for itself. same: judged tokens for which
    greedy decoding gives the same as in the first mode. depths: right and n by fifths of the text.
    nats: per judged token. divergence: mean of KL(first mode || this one) over the judged tokens,
    in nats: it tells of changes long before an answer does.
    """

    task: str
    length: int
    mode: str
    cases: int
    recall: Share
    nats: float
    divergence: float
    judged: bool
    loss: Loss | None
    same: Share
    depths: list[tuple[int, int]]
    cached_tokens: int
    reading: Reading | None


def evaluate(
    subject: Subject, maker: Maker, plan: Plan, told: Callable[[str], None] = lambda line: None
) -> list[Cell]:
    """told: hears of each cell as it is done. Raises EngineEnded."""
    cells: list[Cell] = []
    for length in plan.lengths:
        for task in plan.tasks:
            first: list[Answer] | None = None
            for mode in plan.modes:
                answers = answer(subject, maker, mode, task, length, plan)
                cells.append(cell(task, length, mode.name, answers, first or answers))
                told(_line(cells[-1]))
                first = first or answers
    return cells


def answer(
    subject: Subject,
    maker: Maker,
    mode: Mode,
    task: str,
    length: int,
    plan: Plan,
    watch: Callable[[Engine], None] = lambda engine: None,
) -> list[Answer]:
    """At least plan.probes of them, from as many texts as that takes; the same for every mode.
    watch: called after every step."""
    own = mode.watch

    with subject.engine(mode.engine_settings(length)) as engine:

        def look() -> None:
            own(engine)
            watch(engine)

        asker = Asker(engine, watch=look)
        return list(asker.ask(_cases(maker, task, length, plan)))


def _cases(maker: Maker, task: str, length: int, plan: Plan) -> Iterator[tuple[int, Case]]:
    number = asked = 0
    while asked < plan.probes:
        case = make(task, maker, length, number, plan.seed)
        yield number, case
        number, asked = number + 1, asked + len(case.probes)


def cell(task: str, length: int, mode: str, answers: list[Answer], first: list[Answer]) -> Cell:
    """first: the answers of the mode that others are compared with."""
    right = [one.verdict.right for one in answers]
    full = [one.verdict.right for one in first]
    pairs = [
        pair
        for one, other in zip(answers, first, strict=True)
        for pair in zip(other.verdict.tokens, one.verdict.tokens, strict=True)
    ]
    same = sum(a.greedy == b.greedy for a, b in pairs)
    divergence = sum(a.divergence(b) for a, b in pairs) / len(pairs)
    depths = [(0, 0)] * BINS
    for one in answers:
        at = min(BINS - 1, int(one.probe.depth * BINS))
        depths[at] = depths[at][0] + one.verdict.right, depths[at][1] + 1
    return Cell(
        task, length, mode, len({one.case for one in answers}), Share.of(sum(right), len(right)),
        sum(one.verdict.nats for one in answers) / len(pairs), divergence,
        sum(full) >= GATE * len(full), None if first is answers else Loss.of(full, right),
        Share.of(same, len(pairs)), depths,
        sum(one.cached_tokens for one in answers),
        Reading.of([one.kv for one in answers if one.kv is not None]),
    )  # fmt: skip


def _line(one: Cell) -> str:
    loss = "" if one.loss is None else f", loses {one.loss.points:+.1f} points"
    recall, same = one.recall, "" if one.loss is None else f", {one.same.share:.1%} the same"
    nats = f", {one.nats:.3f} nats, {one.divergence:.4f} apart"
    return f"{one.task} at {one.length}, {one.mode}: {recall.right}/{recall.n}{loss}{same}{nats}"
