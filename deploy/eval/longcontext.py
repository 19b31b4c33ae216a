"""Recall over long contexts, mode by mode, on the same questions (kv-state 3.10)."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import msgspec

from expertmesh.deploy.eval.asking import Answer, Answers, Judged, Reading, ask
from expertmesh.deploy.eval.cases import Case, Maker
from expertmesh.deploy.eval.reading import Held, Mode, Reads
from expertmesh.deploy.eval.statistics import Loss, Share
from expertmesh.deploy.eval.subject import Subject
from expertmesh.deploy.eval.tasks import make

ROOM_TOKENS = 512  # by which a text may be longer than it was meant to be
BINS = 5
# Below this there is little to lose: a mode is judged only where everything at hand gets so much.
GATE = 0.95


@dataclass(frozen=True, slots=True)
class Plan:
    tasks: Sequence[str]
    lengths: Sequence[int]
    modes: Sequence[Mode]
    probes: int
    seed: int = 0


class Cell(msgspec.Struct, frozen=True, kw_only=True):
    """One task at one length in one mode.

    texts: how many there were; n of `recall` counts questions, several per text. judged: whether
    the first mode reaches GATE here. loss: against the first mode, None for itself. same: judged
    tokens for which greedy decoding gives the same as in the first mode. depths: right and n by
    fifths of the text. nats: per judged token. divergence: mean of KL(first mode || this one) over
    the judged tokens, in nats: it tells of changes long before an answer does.

    needs: of the questions that the first mode gets right and the blind one wrong, how many this
    mode gets right; needs_tokens: of the judged tokens for which these two would give another, how
    many this mode gives as the first does. None where there is no blind mode. share: device bytes
    of a sequence that answers, over its latents in full.
    """

    task: str
    length: int
    mode: str
    reads: Reads
    texts: int
    recall: Share
    loss: Loss | None
    judged: bool
    needs: Share | None
    needs_tokens: Share | None
    same: Share
    nats: float
    divergence: float
    depths: list[tuple[int, int]]
    share: float
    held: Held
    reading: Reading | None


def evaluate(
    subject: Subject, maker: Maker, plan: Plan, told: Callable[[str], None] = lambda line: None
) -> list[Cell]:
    """told: hears of each text, and of each cell as it is done."""
    found: list[Cell] = []
    for length in plan.lengths:
        for task in plan.tasks:
            texts = _cases(maker, task, length, plan, told)
            answered = ask(subject, texts, plan.modes, length + ROOM_TOKENS)
            for one in cells(task, length, answered):
                told(_line(one))
                found.append(one)
    return found


def _cases(
    maker: Maker, task: str, length: int, plan: Plan, told: Callable[[str], None]
) -> Iterator[tuple[int, Case]]:
    """Texts until at least plan.probes questions were asked."""
    number = asked = 0
    while asked < plan.probes:
        case = make(task, maker, length, number, plan.seed)
        yield number, case
        number, asked = number + 1, asked + len(case.probes)
        told(f"{task} at {length}: text {number}, {asked} questions of {plan.probes}")


def cells(task: str, length: int, answered: Sequence[Answers]) -> list[Cell]:
    """Of one task and length: what each mode answered to the same questions."""
    first = answered[0].answers
    blind = next((one.answers for one in answered if one.mode.reads == "blind"), None)
    return [_cell(task, length, one, first, blind) for one in answered]


def _cell(
    task: str, length: int, own: Answers, first: list[Answer], blind: list[Answer] | None
) -> Cell:
    answers, full = own.answers, [one.right for one in first]
    right, tokens = [one.right for one in answers], _tokens(answers)
    same = [a.greedy == b.greedy for a, b in zip(_tokens(first), tokens, strict=True)]
    needs = needs_tokens = None
    if blind is not None:
        other = [a.greedy != b.greedy for a, b in zip(_tokens(first), _tokens(blind), strict=True)]
        lost = [a and not b.right for a, b in zip(full, blind, strict=True)]
        needs, needs_tokens = _among(lost, right), _among(other, same)
    return Cell(
        task=task, length=length, mode=own.mode.name, reads=own.mode.reads,
        texts=len({one.case for one in answers}), recall=Share.of(sum(right), len(right)),
        loss=None if answers is first else Loss.of(full, right),
        judged=sum(full) >= GATE * len(full), needs=needs, needs_tokens=needs_tokens,
        same=Share.of(sum(same), len(same)), nats=sum(one.nats for one in tokens) / len(tokens),
        divergence=sum(one.divergence for one in tokens) / len(tokens), depths=_depths(answers),
        share=own.held.share, held=own.held, reading=own.reading,
    )  # fmt: skip


def _tokens(answers: Sequence[Answer]) -> list[Judged]:
    return [token for one in answers for token in one.tokens]


def _among(chosen: list[bool], right: list[bool]) -> Share:
    kept = [good for one, good in zip(chosen, right, strict=True) if one]
    return Share.of(sum(kept), len(kept))


def _depths(answers: Sequence[Answer]) -> list[tuple[int, int]]:
    depths = [(0, 0)] * BINS
    for one in answers:
        at = min(BINS - 1, int(one.depth * BINS))
        depths[at] = depths[at][0] + one.right, depths[at][1] + 1
    return depths


def _line(one: Cell) -> str:
    line = f"{one.task} at {one.length}, {one.mode}: {one.share:.1%} on the device"
    line += f", {one.recall.right}/{one.recall.n}"
    if one.loss is not None:
        line += f", loses {one.loss.points:+.1f} points, {one.divergence:.2g} nats apart"
    if one.needs is not None and one.needs_tokens is not None:
        line += f", of those that need latents {one.needs.right}/{one.needs.n}"
        line += f" ({one.needs_tokens.right}/{one.needs_tokens.n} tokens)"
    return line
