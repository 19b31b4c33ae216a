"""One choice of an answer: engine outputs in, text deltas out, until a stop or the end."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from expertmesh.actors.attention.messages import TokenLogprobs, TokenOutput
from expertmesh.actors.model.stop_strings import StopStringMatcher
from expertmesh.actors.model.tokenizer import IncrementalDetokenizer, Tokenizer


@dataclass(slots=True)
class TextDelta:
    """What one engine output adds to a choice.

    token_ids: every token counted in usage, so including a stop token whose text is hidden.
    offsets: for each token, the length of the text before it (only with logprobs).
    finish: "stop" | "length" | None. stop_reason: the stop string or id that ended the choice.
    """

    text: str
    token_ids: list[int]
    logprobs: list[TokenLogprobs] | None = None
    offsets: list[int] = field(default_factory=list)
    finish: str | None = None
    stop_reason: int | str | None = None


class ChoiceText:
    """Turns token ids into text: whole characters only, cut before the first stop string.

    The text is the same however the ids are grouped into outputs, which is what makes a streamed
    answer equal to the plain one. Without a tokenizer the text stays empty.
    """

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        *,
        stops: Sequence[str] = (),
        include_stop: bool = False,
        skip_special: bool = True,
        min_tokens: int = 0,
        text_before: int = 0,
    ) -> None:
        """text_before: length of the echoed prompt, where offsets start.

        min_tokens: no stop string is looked for in the first min_tokens tokens.
        """
        self._detokenizer = (
            None if tokenizer is None else IncrementalDetokenizer(tokenizer, skip_special)
        )
        self._matcher = StopStringMatcher(stops, include_stop) if stops else None
        self._include_stop = include_stop
        self._min_tokens = min_tokens
        self._length = text_before
        self.tokens = 0

    def feed(self, output: TokenOutput) -> TextDelta:
        """The next delta. After one with `finish`, nothing may be fed."""
        ids = output.token_ids
        delta = TextDelta("", ids, output.logprobs, [], output.finish_reason, output.stop_reason)
        ended_by_token = output.finish_reason == "stop" and not self._include_stop
        visible = ids[:-1] if ended_by_token else ids
        if self._matcher is None and output.logprobs is None:
            self.tokens += len(ids)
            if self._detokenizer is not None:
                delta.text = self._detokenizer.push(visible)
                if output.finish_reason is not None:
                    delta.text += self._detokenizer.finish()
            return delta
        self._feed_each(delta, visible)
        return delta

    def _feed_each(self, delta: TextDelta, visible: list[int]) -> None:
        """Token by token: a stop string ends the choice at the token that completes it."""
        emitted: list[str] = []
        for count, token in enumerate(delta.token_ids, start=1):
            self.tokens += 1
            delta.offsets.append(self._length)
            if count > len(visible) or self._detokenizer is None:
                continue
            piece = self._detokenizer.push([token])
            self._length += len(piece)
            matched = self._emit(piece, emitted)
            if matched is not None:
                delta.token_ids = delta.token_ids[:count]
                if delta.logprobs is not None:
                    delta.logprobs = delta.logprobs[:count]
                delta.finish, delta.stop_reason = "stop", matched
                break
        else:
            if delta.finish is not None and self._detokenizer is not None:
                matched = self._emit(self._detokenizer.finish(), emitted)
                if matched is not None:
                    delta.finish, delta.stop_reason = "stop", matched
                elif self._matcher is not None:
                    emitted.append(self._matcher.finish())
        delta.text = "".join(emitted)

    def _emit(self, piece: str, emitted: list[str]) -> str | None:
        if self._matcher is None or self.tokens <= self._min_tokens:
            emitted.append(piece)
            return None
        text, matched = self._matcher.push(piece)
        emitted.append(text)
        return matched
