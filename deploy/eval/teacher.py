"""A sampler that draws nothing: it reads what a known text says next, and how likely that was.

Put in the place of an engine's sampler, it leads requests through a text token by token, so that
all of it takes the decode path of the engine, whatever the model would have said (teacher forcing).
A row's judgement depends on its own logits alone.
"""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from expertmesh.actors.attention.engine import Engine
from expertmesh.actors.attention.masks import Masks
from expertmesh.actors.attention.sampler import Sampled, Sampler, SamplingKernels
from expertmesh.actors.attention.sequence import Sequence
from expertmesh.deploy.eval.cases import Probe


@dataclass(frozen=True, slots=True)
class Judged:
    """One token of a span. greedy: what greedy decoding would have given. logprobs_V: float32, of
    the whole vocabulary."""

    token: int
    greedy: int
    logprobs_V: Tensor

    def divergence(self, other: "Judged") -> float:
        """KL(self || other), in nats."""
        mine = self.logprobs_V.double()
        return float((mine.exp() * (mine - other.logprobs_V.double())).sum())


@dataclass(slots=True)
class Verdict:
    """Of one probe: the tokens of its spans, filled as they come."""

    tokens: list[Judged] = field(default_factory=list)

    @property
    def right(self) -> bool:
        """Whether greedy decoding would have given every token of every span."""
        return all(one.greedy == one.token for one in self.tokens)

    @property
    def nats(self) -> float:
        return -sum(float(one.logprobs_V[one.token]) for one in self.tokens)


@dataclass(slots=True)
class _Lesson:
    probe: Probe
    verdict: Verdict = field(default_factory=Verdict)

    def wanted(self, at: int) -> bool:
        return any(begin <= at < end for begin, end in self.probe.spans)

    def first(self, at: int) -> bool:
        return any(begin == at for begin, _ in self.probe.spans)


class Teacher(Sampler):
    """Takes the place of `Engine.sampler`. Requests that it has not been told of are sampled as
    usual."""

    @classmethod
    def of(cls, engine: Engine) -> "Teacher":
        """In the place of the engine's own."""
        teacher = cls(engine.model.kernels, engine.state.latents.device)
        engine.sampler = teacher
        return teacher

    def __init__(self, kernels: SamplingKernels, device: torch.device | str = "cpu") -> None:
        super().__init__(kernels, device)
        self._lessons: dict[str, _Lesson] = {}

    def teach(self, request_id: str, probe: Probe) -> Verdict:
        """From now on this request says what the probe says. The verdict is whole once the request
        has ended."""
        lesson = self._lessons[request_id] = _Lesson(probe)
        return lesson.verdict

    def forget(self, request_id: str) -> None:
        self._lessons.pop(request_id, None)

    @torch.inference_mode()
    def sample(
        self, logits_BV: Tensor, sequences: list[Sequence], masks: Masks | None = None
    ) -> Sampled:
        taught = [
            (row, self._lessons[seq.id], seq.generated)
            for row, seq in enumerate(sequences)
            if seq.id in self._lessons
        ]
        for row, lesson, at in taught:
            if lesson.wanted(at):
                _judge(lesson, at, logits_BV[row])
        sampled = super().sample(logits_BV, sequences, masks)
        for row, lesson, at in taught:
            sampled.ids[row] = lesson.probe.ids[at]
        return sampled


def _judge(lesson: _Lesson, at: int, logits_V: Tensor) -> None:
    choices = list(lesson.probe.choices) if lesson.first(at) else []
    best = choices[int(logits_V[choices].argmax())] if choices else int(logits_V.argmax())
    logprobs_V = logits_V.float().log_softmax(0)
    lesson.verdict.tokens.append(Judged(lesson.probe.ids[at], best, logprobs_V))
