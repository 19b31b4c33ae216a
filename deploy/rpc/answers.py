"""Messages of one Generate call: engine outputs in, chunks and ends of choices out."""

from base64 import b64decode
from collections.abc import Sequence
from dataclasses import dataclass, field

from expertmesh.actors.attention.messages import TokenLogprobs, TokenOutput
from expertmesh.deploy.openai.completions import CompletionGeneration
from expertmesh.deploy.openai.logprobs import finite
from expertmesh.deploy.rpc.v1 import engine_pb2 as pb


@dataclass(slots=True)
class _Choice:
    """What has come of one choice. The log-probabilities only without chunks."""

    prompt_ids: list[int]
    prompt_top: int
    top: int
    ids: list[int] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    cached: int = 0
    scored: pb.InputLogProbs | None = None
    logprobs: pb.OutputLogProbs | None = None
    ended: bool = False


class Answer:
    """`feed` is called with each engine output of a choice, in order."""

    def __init__(self, generation: CompletionGeneration, request_id: str) -> None:
        self._generation, self._id = generation, request_id
        self._choices = [
            _Choice(one.prompt_ids, one.params.prompt_logprobs or 0, one.params.logprobs or 0)
            for one in generation.requests
        ]

    def feed(self, index: int, output: TokenOutput) -> tuple[list[pb.GenerateResponse], bool]:
        """(messages to send, whether the choice is complete)."""
        delta = self._generation.read(index, output)
        choice = self._choices[index]
        choice.ids += delta.token_ids
        choice.texts.append(delta.text)
        choice.cached = max(choice.cached, output.cached_tokens)
        logprobs = scored = None
        if delta.logprobs is not None:
            logprobs = _output_logprobs(delta.logprobs, choice.top)
        if output.prompt_logprobs is not None:
            scored = _input_logprobs(choice.prompt_ids, output.prompt_logprobs, choice.prompt_top)
        messages = []
        if self._generation.stream:
            if delta.token_ids or delta.text or scored is not None:
                chunk = pb.GenerateStreamChunk(
                    token_ids=delta.token_ids,
                    prompt_tokens=len(choice.prompt_ids),
                    completion_tokens=len(choice.ids),
                    cached_tokens=choice.cached,
                    output_logprobs=logprobs,
                    input_logprobs=scored,
                    index=index,
                    text=delta.text,
                )
                messages.append(pb.GenerateResponse(request_id=self._id, chunk=chunk))
        else:
            choice.scored = choice.scored or scored
            _extend(choice, logprobs)
        if delta.finish is not None:
            messages.append(self._complete(index, delta.finish, delta.stop_reason))
        return messages, delta.finish is not None

    def aborted(self) -> list[pb.GenerateResponse]:
        """The ends of all choices that have none yet."""
        left = [index for index, choice in enumerate(self._choices) if not choice.ended]
        return [self._complete(index, "abort", None) for index in left]

    def _complete(
        self, index: int, finish: str, stop_reason: int | str | None
    ) -> pb.GenerateResponse:
        choice = self._choices[index]
        choice.ended = True
        complete = pb.GenerateComplete(
            output_ids=choice.ids,
            finish_reason=finish,
            prompt_tokens=len(choice.prompt_ids),
            completion_tokens=len(choice.ids),
            cached_tokens=choice.cached,
            output_logprobs=choice.logprobs,
            input_logprobs=choice.scored,
            index=index,
            text="".join(choice.texts),
        )
        if isinstance(stop_reason, str):
            complete.matched_stop_str = stop_reason
        elif stop_reason is not None:
            complete.matched_token_id = stop_reason
        routed = self._generation.routed_experts(index)
        if routed is not None:
            complete.routed_experts = b64decode(routed)
        report = self._generation.kv_report(index)
        if report is not None:
            fields = {name: getattr(report, name) for name in report.__struct_fields__}
            complete.kv.CopyFrom(pb.KvReport(**fields))
        return pb.GenerateResponse(request_id=self._id, complete=complete)


def aborted(request_id: str, index: int) -> pb.GenerateResponse:
    """The end of a choice that had not begun."""
    complete = pb.GenerateComplete(finish_reason="abort", index=index)
    return pb.GenerateResponse(request_id=request_id, complete=complete)


def _extend(choice: _Choice, logprobs: pb.OutputLogProbs | None) -> None:
    if logprobs is None:
        return
    if choice.logprobs is None:
        choice.logprobs = pb.OutputLogProbs()
    choice.logprobs.MergeFrom(logprobs)  # repeated fields are joined


def _top(entry: TokenLogprobs, count: int) -> pb.TopLogProbs:
    best = entry.top[:count]
    return pb.TopLogProbs(
        values=[finite(value) for _, value in best], token_ids=[token for token, _ in best]
    )


def _output_logprobs(entries: Sequence[TokenLogprobs], top: int) -> pb.OutputLogProbs:
    return pb.OutputLogProbs(
        token_logprobs=[finite(entry.logprob) for entry in entries],
        token_ids=[entry.token_id for entry in entries],
        top_logprobs=[_top(entry, top) for entry in entries] if top else [],
    )


def _input_logprobs(
    ids: Sequence[int], entries: Sequence[TokenLogprobs | None], top: int
) -> pb.InputLogProbs:
    return pb.InputLogProbs(
        token_logprobs=[
            pb.InputTokenLogProb(value=None if entry is None else finite(entry.logprob))
            for entry in entries
        ],
        token_ids=ids,
        top_logprobs=[pb.TopLogProbs() if entry is None else _top(entry, top) for entry in entries]
        if top
        else [],
    )
