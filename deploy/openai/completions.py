"""POST /v1/completions: text or token ids in, text out, with scoring by echo and logprobs."""

from dataclasses import dataclass
from typing import Any

import orjson

from expertmesh.actors.attention.messages import TokenLogprobs, TokenOutput
from expertmesh.actors.model.tokenizer import IncrementalDetokenizer
from expertmesh.deploy.auth.keys import ApiKey
from expertmesh.deploy.openai import constraints
from expertmesh.deploy.openai.choice import ChoiceText, TextDelta
from expertmesh.deploy.openai.errors import bad
from expertmesh.deploy.openai.generation import Generation
from expertmesh.deploy.openai.logprobs import CompletionLogprobs, TokenSpelling
from expertmesh.deploy.openai.protocol import CompletionRequest
from expertmesh.deploy.openai.sampling import (
    check_ids,
    check_length,
    check_request,
    generate_requests,
    token_budget,
)
from expertmesh.deploy.openai.served import ServedModel

# OpenAI's default when a completion names no limit.
DEFAULT_MAX_TOKENS = 16


@dataclass(frozen=True, slots=True)
class Prompt:
    """ids and, for echo, the text they stand for. offsets: where each token's text begins."""

    ids: list[int]
    text: str
    offsets: list[int]


def prepare(
    request: CompletionRequest, served: ServedModel, key: ApiKey | None
) -> "CompletionGeneration":
    """Checks everything and tokenises. Touches no event loop, so that a large request can be
    prepared in a thread. key: see Generation. Raises ApiError."""
    check_request(request, served, len(request.prompt))
    if request.logprobs is not None and request.logprobs > served.limits.logprobs:
        raise bad(
            f"logprobs must be 0 to {served.limits.logprobs}, not {str(request.logprobs)[:40]}",
            "logprobs",
        )
    if request.best_of not in (None, request.n):
        raise bad(f"best_of must equal n ({request.n}): all answers made are given", "best_of")
    return CompletionGeneration(request, served, key)


def read_prompts(request: CompletionRequest, served: ServedModel) -> list[Prompt]:
    """Token ids of every prompt. An empty one is refused: there is no BOS to stand in for it."""
    prompts = []
    many = len(request.prompt) > 1
    for number, prompt in enumerate(request.prompt):
        param = f"prompt[{number}]" if many else "prompt"
        ids: list[int]
        if isinstance(prompt, str):
            if served.tokenizer is None:
                raise bad(
                    "this checkpoint has no tokenizer: send the prompt as a list of token ids",
                    param,
                )
            check_length(len(prompt), served, param)
            ids = served.tokenizer.encode(prompt)
        else:
            ids = prompt
            check_ids(ids, served.vocab_size, param)
        if not ids:
            raise bad(f"'{param}' has no tokens", param)
        prompts.append(_echoed(request, served, ids, prompt))
    return prompts


def _echoed(
    request: CompletionRequest, served: ServedModel, ids: list[int], prompt: str | list[int]
) -> Prompt:
    if not request.echo or served.tokenizer is None:
        return Prompt(ids, "", [0] * len(ids) if request.logprobs is not None else [])
    # A text prompt has no special tokens; ids may, and then show as the answer's would.
    skip = request.skip_special_tokens and not isinstance(prompt, str)
    detokenizer = IncrementalDetokenizer(served.tokenizer, skip)
    offsets, pieces, length = [], [], 0
    for token in ids:
        offsets.append(length)
        pieces.append(detokenizer.push([token]))
        length += len(pieces[-1])
    pieces.append(detokenizer.finish())
    return Prompt(ids, prompt if isinstance(prompt, str) else "".join(pieces), offsets)


class CompletionGeneration(Generation):
    """The state of one completions request."""

    def __init__(self, request: CompletionRequest, served: ServedModel, key: ApiKey | None) -> None:
        super().__init__(request, served, key, "cmpl", "text_completion")
        self._echo = request.echo
        self._return_ids = request.return_token_ids or served.tokenizer is None
        top = request.logprobs
        if top is not None:
            top = min(top, served.vocab_size)
        self._spell = TokenSpelling(served.tokenizer, request.return_tokens_as_token_ids)
        prompts = read_prompts(request, served)
        constraint = constraints.asked(request, served)
        if constraint is not None:
            self.grammars.append(constraint)
        for number, prompt in enumerate(prompts):
            budget = token_budget(
                request, served, len(prompt.ids), request.max_tokens, DEFAULT_MAX_TOKENS,
                "max_tokens",
            )  # fmt: skip
            for one in generate_requests(
                request,
                f"{self.internal_id}-{number}",
                self.tenant,
                prompt.ids,
                budget,
                logprobs=top,
                prompt_logprobs=top if request.echo else None,
                constraint=constraint,
            ):
                self.add(one)
        self._prompts = [prompt for prompt in prompts for _ in range(request.n)]
        self._texts = [
            ChoiceText(
                served.tokenizer,
                stops=request.stop,
                include_stop=request.include_stop_str_in_output,
                skip_special=request.skip_special_tokens,
                min_tokens=request.min_tokens,
                text_before=len(prompt.text),
            )
            for prompt in self._prompts
        ]
        self._logprobs = [
            None if top is None else CompletionLogprobs(self._spell, top) for _ in self._prompts
        ]
        self._begun = [False] * len(self._prompts)
        # The plain answer's parts, filled only when it is asked for.
        self._parts: list[list[str]] = [[] for _ in self._prompts]
        self._ids: list[list[int]] = [[] for _ in self._prompts]
        self._ends: list[TextDelta | None] = [None] * len(self._prompts)

    def read(self, index: int, output: TokenOutput) -> TextDelta:
        """The output as text, counted. What `feed` does before it writes JSON."""
        delta = self._texts[index].feed(output)
        self.account(index, output, len(delta.token_ids))
        if delta.finish is not None:
            self.choice_finished(delta.finish)
        return delta

    def feed(self, index: int, output: TokenOutput) -> tuple[bytes, bool]:
        first = not self._begun[index]
        self._begun[index] = True
        delta = self.read(index, output)
        if first and self._echo:
            delta.text = self._prompts[index].text + delta.text
            self._score_prompt(index, output.prompt_logprobs)
        self._score(index, delta)
        done = delta.finish is not None
        if self.stream:
            return self._chunk(index, delta, first), done
        self._parts[index].append(delta.text)
        self._ids[index] += delta.token_ids
        if done:
            self._ends[index] = delta
        return b"", done

    def _score_prompt(self, index: int, entries: list[TokenLogprobs | None] | None) -> None:
        logprobs = self._logprobs[index]
        if logprobs is None or entries is None:
            return
        prompt = self._prompts[index]
        for token, entry, offset in zip(prompt.ids, entries, prompt.offsets, strict=True):
            logprobs.add(token, entry, offset)

    def _score(self, index: int, delta: TextDelta) -> None:
        logprobs = self._logprobs[index]
        if logprobs is not None and delta.logprobs is not None:
            for entry, offset in zip(delta.logprobs, delta.offsets, strict=True):
                logprobs.add(entry.token_id, entry, offset)

    def opening(self) -> bytes:
        return b""

    def _chunk(self, index: int, delta: TextDelta, first: bool) -> bytes:
        head = self.open_choice(index) + b'"text":' + orjson.dumps(delta.text)
        logprobs = self._logprobs[index]
        if logprobs is None and delta.finish is None and not self._return_ids:
            if not delta.text:
                return b""  # half a character, or text held back for a stop string
            return head + b',"logprobs":null,"finish_reason":null}]}\n\n'
        rest: dict[str, Any] = {
            "logprobs": None if logprobs is None else logprobs.take(),
            "finish_reason": delta.finish,
        }
        if delta.finish is not None:
            rest |= {"stop_reason": delta.stop_reason} | self.ending(index)
        if self._return_ids:
            rest["token_ids"] = delta.token_ids
            if first:
                rest["prompt_token_ids"] = self._prompts[index].ids
        return head + b"," + orjson.dumps(rest)[1:] + b"]}\n\n"

    def choice(self, index: int) -> dict[str, Any]:
        end, logprobs = self._ends[index], self._logprobs[index]
        assert end is not None, "choice() before the end"
        out = {
            "index": index,
            "text": "".join(self._parts[index]),
            "logprobs": None if logprobs is None else logprobs.take(),
            "finish_reason": end.finish,
            "stop_reason": end.stop_reason,
        } | self.ending(index)
        if self._return_ids:
            out["token_ids"] = self._ids[index]
            out["prompt_token_ids"] = self._prompts[index].ids
        return out
