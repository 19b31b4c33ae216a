"""POST /v1/chat/completions: messages in; reasoning, content and tool calls out."""

from collections.abc import Iterable, Iterator
from typing import Any

import orjson

from expertmesh.actors.attention.messages import TokenLogprobs, TokenOutput
from expertmesh.actors.model.chat import (
    CallDelta,
    ChatDelta,
    ChatError,
    ChatParser,
    ChatTurn,
    prepare_chat,
)
from expertmesh.actors.model.stop_strings import StopStringMatcher
from expertmesh.actors.model.tokenizer import Tokenizer
from expertmesh.deploy.auth.keys import ApiKey
from expertmesh.deploy.openai import constraints
from expertmesh.deploy.openai.errors import bad
from expertmesh.deploy.openai.generation import Generation
from expertmesh.deploy.openai.logprobs import TokenSpelling, chat_logprobs
from expertmesh.deploy.openai.protocol import ChatRequest, ChatTemplateOptions
from expertmesh.deploy.openai.sampling import (
    check_length,
    check_request,
    generate_requests,
    token_budget,
)
from expertmesh.deploy.openai.served import ServedModel

DEFAULT_EFFORT = "max"


def prepare(request: ChatRequest, served: ServedModel, key: ApiKey | None) -> "ChatGeneration":
    """Checks everything, renders and tokenises. Touches no event loop. key: see Generation. Raises
    ApiError."""
    check_request(request, served, 1)
    _check_logprobs(request, served)
    for name in ("max_tokens", "max_completion_tokens"):
        if getattr(request, name) == 0:
            raise bad(f"{name} must be at least 1", name)
    both = (request.max_tokens, request.max_completion_tokens)
    if None not in both and both[0] != both[1]:
        raise bad("max_tokens and max_completion_tokens disagree", "max_completion_tokens")
    return ChatGeneration(request, served, key)


def _check_logprobs(request: ChatRequest, served: ServedModel) -> None:
    top, most = request.top_logprobs, served.limits.logprobs
    if top is None:
        return
    if top > most:
        raise bad(f"top_logprobs must be 0 to {most}, not {str(top)[:40]}", "top_logprobs")
    if top and not request.logprobs:
        raise bad("top_logprobs needs logprobs to be true", "top_logprobs")


def effort(options: ChatTemplateOptions, reasoning_effort: str | None) -> str | None:
    """How long to reason, None = not at all. chat_template_kwargs win over reasoning_effort."""
    thinking = options.thinking
    if thinking is None:
        thinking = reasoning_effort != "none" or options.thinking_effort is not None
    if not thinking:
        return None
    asked = options.thinking_effort or reasoning_effort
    return DEFAULT_EFFORT if asked is None or asked == "none" else asked


def render(
    messages: Any, tools: Any, thinking: str | None, served: ServedModel, **more: Any
) -> ChatTurn:
    """The turn to generate; more: see prepare_chat. Raises ApiError naming the first bad value by
    its path."""
    tokenizer = chat_tokenizer(served)
    if isinstance(tools, list) and len(tools) > served.limits.tools:
        raise bad(f"at most {served.limits.tools} tools, not {len(tools)}", "tools")
    try:
        return prepare_chat(messages, tools, thinking, tokenizer=tokenizer, **more)
    except ChatError as error:
        raise bad(error.message, error.param) from None


def _check_size(messages: Any, served: ServedModel) -> None:
    """Refuses what can not fit before it is rendered. Raises ApiError."""
    count, context = len(messages) if isinstance(messages, list) else 0, served.max_model_len
    if count > context:
        message = f"the context holds {context} tokens, but there are {count} messages"
        raise bad(message, "messages", "context_length_exceeded")
    check_length(sum(map(len, _texts(messages))), served, "messages")


def _texts(messages: Any) -> Iterator[str]:
    """Contents of messages that nobody has checked yet."""
    for message in messages if isinstance(messages, list) else ():
        content = message.get("content") if isinstance(message, dict) else None
        for part in content if isinstance(content, list) else (content,):
            text = part.get("text") if isinstance(part, dict) else part
            if isinstance(text, str):
                yield text


def _turn(request: ChatRequest, thinking: str | None, served: ServedModel) -> ChatTurn:
    _check_size(request.messages, served)
    wanted = request.response_format
    return render(
        request.messages,
        request.tools,
        thinking,
        served,
        tool_choice=request.tool_choice,
        response_format=None if wanted is None else wanted.model_dump(),
        body=constraints.asked(request, served),
        parallel=request.parallel_tool_calls,
    )


def chat_tokenizer(served: ServedModel) -> Tokenizer:
    """The tokenizer, or the 400 that says why there is no chat here."""
    if served.tokenizer is None:
        raise bad(
            "this checkpoint has no tokenizer and so no chat: use /v1/completions with a prompt "
            "of token ids",
            "messages",
        )
    return served.tokenizer


class ChatChoice:
    """One answer: ids through the chat parser, its content through the stop strings.

    Stop strings look at content only. Reasoning and tool calls are structure, where a cut would
    leave neither a thought nor a call.
    """

    def __init__(
        self, request: ChatRequest, tokenizer: Tokenizer, thinking: bool, typed: bool
    ) -> None:
        allowed = request.tool_choice != "none"
        self.parser = ChatParser(tokenizer, thinking, tools_allowed=allowed, typed=typed)
        self._matcher = (
            StopStringMatcher(request.stop, request.include_stop_str_in_output)
            if request.stop
            else None
        )
        self._include_stop = request.include_stop_str_in_output
        self._min_tokens = request.min_tokens
        self.tokens = 0
        self.called = False
        self.finish: str | None = None
        self.stop_reason: int | str | None = None

    def feed(self, output: TokenOutput) -> tuple[ChatDelta, int]:
        """(what is new, how many of the output's ids count). Sets `finish` at the end."""
        ids = output.token_ids
        ended_by_token = output.finish_reason == "stop" and not self._include_stop
        visible = ids[:-1] if ended_by_token else ids
        if self._matcher is None:
            delta = self.parser.push(visible)
            count = len(ids)
        else:
            delta, count = self._feed_each(ids, visible)
        self.tokens += count
        if output.finish_reason is not None and self.finish is None:
            self.finish, self.stop_reason = output.finish_reason, output.stop_reason
            self._end(delta)
        if delta.tool_calls:
            self.called = True
        if self.finish == "stop" and self.called:
            self.finish = "tool_calls"
        return delta, count

    def _feed_each(self, ids: list[int], visible: list[int]) -> tuple[ChatDelta, int]:
        """Token by token: the choice ends at the token that completes a stop string."""
        assert self._matcher is not None
        total = ChatDelta()
        for count, token in enumerate(ids, start=1):
            if count > len(visible):
                break
            delta = self.parser.push([token])
            total.reasoning += delta.reasoning
            total.tool_calls += delta.tool_calls
            if self.tokens + count <= self._min_tokens:
                total.content += delta.content
                continue
            text, matched = self._matcher.push(delta.content)
            total.content += text
            if matched is not None:
                self.finish, self.stop_reason = "stop", matched
                return total, count
        return total, len(ids)

    def _end(self, delta: ChatDelta) -> None:
        rest = self.parser.finish(cut=self.finish == "length")
        delta.reasoning += rest.reasoning
        delta.tool_calls += rest.tool_calls
        if self._matcher is None:
            delta.content += rest.content
            return
        text, matched = self._matcher.push(rest.content)
        delta.content += text
        if matched is None:
            delta.content += self._matcher.finish()
        else:
            self.finish, self.stop_reason = "stop", matched


class ChatGeneration(Generation):
    """The state of one chat request."""

    def __init__(self, request: ChatRequest, served: ServedModel, key: ApiKey | None) -> None:
        super().__init__(request, served, key, "chatcmpl", "chat.completion")
        thinking = effort(request.chat_template_kwargs, request.reasoning_effort)
        turn = _turn(request, thinking, served)
        self._prompt_ids = turn.prompt_ids
        self.grammars += turn.schemas
        if turn.constraint is not None:
            self.grammars.append(turn.constraint)
        asked, param = request.max_completion_tokens, "max_completion_tokens"
        if asked is None:
            asked, param = request.max_tokens, "max_tokens"
        budget = token_budget(
            request, served, len(self._prompt_ids), asked, None, param, "messages"
        )
        self._top: int | None = None
        if request.logprobs:
            self._top = min(request.top_logprobs or 0, served.vocab_size)
        for one in generate_requests(
            request, self.internal_id, self.tenant, self._prompt_ids, budget, self._top, None,
            turn.constraint,
        ):  # fmt: skip
            self.add(one)
        tokenizer = chat_tokenizer(served)
        self._choices = [
            ChatChoice(request, tokenizer, thinking is not None, turn.typed)
            for _ in range(request.n)
        ]
        self._return_ids = request.return_token_ids
        self._spell = TokenSpelling(tokenizer, request.return_tokens_as_token_ids)
        # Of the plain answer only.
        self._deltas: list[list[ChatDelta]] = [[] for _ in self._choices]
        self._scores: list[list[TokenLogprobs]] = [[] for _ in self._choices]
        self._ids: list[list[int]] = [[] for _ in self._choices]

    def _chunk_kind(self) -> str:
        return "chat.completion.chunk"

    def opening(self) -> bytes:
        """A role chunk for each choice, before anything else of it."""
        chunks = []
        for index in range(len(self._choices)):
            rest: dict[str, Any] = {"logprobs": None, "finish_reason": None}
            if self._return_ids:
                rest["prompt_token_ids"] = self._prompt_ids
            delta = b'"delta":{"role":"assistant","content":""},'
            chunks.append(self.open_choice(index) + delta + orjson.dumps(rest)[1:] + b"]}\n\n")
        return b"".join(chunks)

    def feed(self, index: int, output: TokenOutput) -> tuple[bytes, bool]:
        choice = self._choices[index]
        delta, count = choice.feed(output)
        self.account(index, output, count)
        ids = output.token_ids[:count]
        scores = None if output.logprobs is None else output.logprobs[:count]
        done = choice.finish is not None
        if done:
            self.choice_finished(choice.finish)
        if self.stream:
            return self._chunk(index, delta, ids, scores, done), done
        self._deltas[index].append(delta)
        self._ids[index] += ids
        self._scores[index] += scores or ()
        return b"", done

    def _chunk(
        self,
        index: int,
        delta: ChatDelta,
        ids: list[int],
        scores: list[TokenLogprobs] | None,
        done: bool,
    ) -> bytes:
        out = b""
        if delta or scores or (self._return_ids and ids):
            out = self.open_choice(index) + b'"delta":' + orjson.dumps(_delta(delta))
            if scores is None and not self._return_ids:
                out += b',"logprobs":null,"finish_reason":null}]}\n\n'
            else:
                rest: dict[str, Any] = {"logprobs": self._logprobs(scores), "finish_reason": None}
                if self._return_ids:
                    rest["token_ids"] = ids
                out += b"," + orjson.dumps(rest)[1:] + b"]}\n\n"
        if done:
            end = {"delta": {}, "logprobs": None} | self._end(index)
            out += self.open_choice(index) + orjson.dumps(end)[1:] + b"]}\n\n"
        return out

    def _logprobs(self, scores: list[TokenLogprobs] | None) -> dict[str, Any] | None:
        if self._top is None:
            return None
        return {"content": chat_logprobs(scores or [], self._spell, self._top)}

    def _end(self, index: int) -> dict[str, Any]:
        choice = self._choices[index]
        end: dict[str, Any] = {"finish_reason": choice.finish, "stop_reason": choice.stop_reason}
        return end | self.ending(index)

    def choice(self, index: int) -> dict[str, Any]:
        deltas = self._deltas[index]
        calls = _joined(call for delta in deltas for call in delta.tool_calls)
        content = "".join(delta.content for delta in deltas)
        message: dict[str, Any] = {
            "role": "assistant",
            "content": None if calls and not content else content,
        }
        reasoning = "".join(delta.reasoning for delta in deltas)
        if reasoning:
            message["reasoning_content"] = reasoning
        if calls:
            message["tool_calls"] = calls
        out = {
            "index": index,
            "message": message,
            "logprobs": self._logprobs(self._scores[index]),
        } | self._end(index)
        if self._return_ids:
            out["token_ids"] = self._ids[index]
            out["prompt_token_ids"] = self._prompt_ids
        return out

    def usage(self) -> dict[str, Any]:
        reasoning = sum(choice.parser.reasoning_tokens for choice in self._choices)
        return super().usage() | {"completion_tokens_details": {"reasoning_tokens": reasoning}}


def _joined(pieces: Iterable[CallDelta]) -> list[dict[str, Any]]:
    """The calls of a plain answer from the pieces that a stream shows."""
    calls: list[dict[str, Any]] = []
    for piece in pieces:
        if piece.name:
            function = {"name": piece.name, "arguments": ""}
            calls.append({"id": piece.id, "type": "function", "function": function})
        calls[piece.index]["function"]["arguments"] += piece.arguments
    return calls


def _piece(call: CallDelta) -> dict[str, Any]:
    """A call's first piece names it, later ones only go on with its arguments."""
    if not call.name:
        return {"index": call.index, "function": {"arguments": call.arguments}}
    function = {"name": call.name, "arguments": call.arguments}
    return {"index": call.index, "id": call.id, "type": "function", "function": function}


def _delta(delta: ChatDelta) -> dict[str, Any]:
    """The non-empty parts of a stream's delta."""
    out: dict[str, Any] = {}
    if delta.reasoning:
        out["reasoning_content"] = delta.reasoning
    if delta.content:
        out["content"] = delta.content
    if delta.tool_calls:
        out["tool_calls"] = [_piece(call) for call in delta.tool_calls]
    return out
