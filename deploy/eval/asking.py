"""Everything that is asked, in every mode: each text is read once for all modes and questions."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from math import isfinite

import msgspec
from torch import Tensor

from expertmesh.actors.state.offload.context import Reading as OffloadReading
from expertmesh.deploy.eval.cases import Case, Probe
from expertmesh.deploy.eval.fork import Fork
from expertmesh.deploy.eval.reading import Held, Mode, Reader
from expertmesh.deploy.eval.subject import Subject


@dataclass(frozen=True, slots=True)
class Judged:
    """One token of an answer. greedy: what greedy decoding would have given. nats: minus the log
    probability of the token. divergence: KL(first mode || this one) of the whole prediction."""

    token: int
    greedy: int
    nats: float
    divergence: float


@dataclass(frozen=True, slots=True)
class Answer:
    """case: its number. depth: of what was asked for, in the text."""

    case: int
    depth: float
    tokens: tuple[Judged, ...]

    @property
    def right(self) -> bool:
        """Whether greedy decoding would have given every token."""
        return all(one.greedy == one.token for one in self.tokens)

    @property
    def nats(self) -> float:
        return sum(one.nats for one in self.tokens)


class Reading(msgspec.Struct):
    """How `select` read old pages: sums over steps and layers, and the largest bound. bound_kind:
    "certificate" where it is proven on the relative error of a head's output, else "estimate", of
    the weight that fell on estimates. bits: per value, of what estimates were made from. reads: how
    often a layer read for a token."""

    reads: int = 0
    read_pages: int = 0
    estimated_pages: int = 0
    bits: float = 0.0
    bound: float = 0.0
    bound_kind: str = ""

    @property
    def per_step(self) -> float:
        """Old pages that a layer read exactly for a token."""
        return self.read_pages / max(1, self.reads)

    def add(self, one: OffloadReading, reads: int) -> None:
        """What the questions about one text took."""
        proven = isfinite(one.bound)
        self.reads += reads
        self.read_pages += one.read_pages
        self.estimated_pages += one.estimated_pages
        self.bits = one.bits
        self.bound = max(self.bound, one.bound if proven else one.estimated_share)
        self.bound_kind = "certificate" if proven else "estimate"


NOTHING_HELD = Held(0, 0, 0, 0, 0, 1)


@dataclass(slots=True)
class Answers:
    """Of one mode to all questions. held: the most of any text."""

    mode: Mode
    answers: list[Answer] = field(default_factory=list)
    held: Held = NOTHING_HELD
    reading: Reading | None = None


def ask(
    subject: Subject,
    cases: Iterable[tuple[int, Case]],
    modes: Sequence[Mode],
    room: int,
) -> list[Answers]:
    """cases: with their numbers, no text longer than `room` tokens. One for each mode, in order;
    the same questions for all. Raises ValueError as Fork does."""
    fork, found = Fork(subject, room), [Answers(mode) for mode in modes]
    for number, case in cases:
        fork.read(case.context)
        first: list[Tensor] = []
        for own in found:
            reader = fork.reader(own.mode)
            predicted = list(fork.ask(case.probes, reader))
            first = first or predicted
            own.answers += [
                _answer(number, probe, mine_JV, theirs_JV)
                for probe, mine_JV, theirs_JV in zip(case.probes, predicted, first, strict=True)
            ]
            _count(own, reader, case, subject.mla_layers)
    return found


def _answer(number: int, probe: Probe, mine_JV: Tensor, theirs_JV: Tensor) -> Answer:
    wanted = [at for begin, end in probe.spans for at in range(begin, end)]
    firsts = {begin for begin, _ in probe.spans}
    apart_J = (theirs_JV.double().exp() * (theirs_JV.double() - mine_JV.double())).sum(dim=1)
    tokens = []
    for row, at in enumerate(wanted):
        choices = list(probe.choices) if at in firsts else []
        best = int(mine_JV[row, choices].argmax()) if choices else int(mine_JV[row].argmax())
        greedy, token = choices[best] if choices else best, probe.ids[at]
        tokens.append(Judged(token, greedy, -float(mine_JV[row, token]), float(apart_J[row])))
    return Answer(number, probe.depth, tuple(tokens))


def _count(own: Answers, reader: Reader, case: Case, layers: int) -> None:
    """What this text has taken, and how it was read."""
    held = reader.held(max(len(probe.ids) for probe in case.probes))
    own.held = max(own.held, held, key=lambda one: one.share)
    if own.mode.reads == "select" and reader.far is not None:
        own.reading = own.reading or Reading()
        steps = sum(len(probe.ids) - 1 for probe in case.probes)
        own.reading.add(reader.far.reading, steps * layers)
