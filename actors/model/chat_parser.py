"""Generated token ids of a chat answer, parsed as they arrive (k3-model.md 4.3).

The parser works on ids: only a real marker id is a marker, whatever the text spells. It is a state
machine that takes one id at a time, so that the deltas of a stream, added up, are the parse of the
whole answer however the ids are split over pushes.

An answer is a row of elements: think (opened by the prompt), response, tools. What is repaired:
- `<|close|>response` without a `<|close|>think` (seen on very long prompts): the text was the
  answer. It was streamed as reasoning by then; it is sent as content too.
- Text between think and response counts as content; text after the elements is dropped.
- Calls outside a tools element count; neither calls nor their arguments need to be closed when the
  answer ends by itself. A call without a tool name is dropped. One that max_tokens cuts off stays
  as far as it came, with arguments that are no JSON: a stream has shown it by then.
- A marker that never becomes a tag loses the marker and keeps its text.
Without K3's markers (the 48B family) everything is content.
"""

import codecs
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from expertmesh.actors.model import chat_xtml
from expertmesh.actors.model.chat_calls import CallDelta, CallWriter
from expertmesh.actors.model.tokenizer import Tokenizer

MAX_TAG_BYTES = 2048  # a longer "tag" is text after a stray marker
_ATTRIBUTE = re.compile(r'([^\s="]+)="([^"]*)"')

Section = Literal["think", "between", "response", "tools", "after"]
_ELEMENTS: dict[str, Section] = {"think": "think", "response": "response", "tools": "tools"}


@dataclass(slots=True)
class ChatDelta:
    """What one push adds to the answer. False when it adds nothing."""

    reasoning: str = ""
    content: str = ""
    tool_calls: list[CallDelta] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.reasoning or self.content or self.tool_calls)


def kimi_call_id(name: str, index: int) -> str:
    """Kimi's own naming of calls: unique within one answer."""
    return f"functions.{name}:{index}"


class ChatParser:
    """Parses one answer. `push` ids as they come, then `finish` once."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        thinking: bool,
        *,
        tools_allowed: bool = True,
        typed: bool = False,
        call_id: Callable[[str, int], str] = kimi_call_id,
    ) -> None:
        """
        Args:
            thinking: whether the prompt ended inside think (else inside response).
            tools_allowed: False drops calls (tool_choice "none").
            typed: a grammar keeps arguments to their types.
            call_id: makes the id of a call from its name and index.
        """
        self.reasoning_tokens = 0  # ids inside think, for usage
        self._tokenizer = tokenizer
        self._tools_allowed, self._typed = tools_allowed, typed
        self._call_id = call_id
        structured = chat_xtml.has_markers(tokenizer)
        self._open, self._close, self._sep, self._end = (
            tokenizer.special_id(name) if structured else None
            for name in (chat_xtml.OPEN, chat_xtml.CLOSE, chat_xtml.SEP, chat_xtml.END)
        )
        self._section: Section = "think" if thinking and structured else "response"
        self._tag: bytearray | None = None  # a tag being read, after its open or close marker
        self._tag_closes = False
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._reasoning: list[str] = []
        self._call: CallWriter | None = None
        self._calls = 0
        self._reasoning_out: list[str] = []  # what the next delta carries
        self._content_out: list[str] = []
        self._calls_out: list[CallDelta] = []

    def push(self, ids: Sequence[int]) -> ChatDelta:
        """What these ids add to the answer."""
        for token_id in ids:
            self._take(token_id)
        return self._flush()

    def finish(self, cut: bool = False) -> ChatDelta:
        """The rest: half a character shows as U+FFFD; half a tag is dropped.

        cut: the answer has not ended by itself; an open call stays open.
        """
        if self._tag is None:
            self._end_text()
        self._tag = None
        if not cut:
            self._end_call()
        return self._flush()

    def _flush(self) -> ChatDelta:
        reasoning, content = "".join(self._reasoning_out), "".join(self._content_out)
        delta = ChatDelta(reasoning, content, self._calls_out)
        self._reasoning_out, self._content_out, self._calls_out = [], [], []
        return delta

    def _take(self, token_id: int) -> None:
        if token_id in (self._open, self._close):
            self._start_tag(closes=token_id == self._close)
        elif token_id == self._sep:
            self._end_tag()
        elif token_id == self._end:
            self._abandon_tag()
            self._end_text()
            self._enter("after")
        elif self._tokenizer.is_special(token_id):
            return  # no reserved or end marker shows in an answer
        elif self._tag is None:
            self.reasoning_tokens += self._section == "think"
            self._emit(self._utf8.decode(self._tokenizer.token_bytes(token_id)))
        else:
            self._tag += self._tokenizer.token_bytes(token_id)
            if len(self._tag) > MAX_TAG_BYTES:
                self._abandon_tag()

    def _start_tag(self, closes: bool) -> None:
        self._abandon_tag()
        self._end_text()
        self._tag, self._tag_closes = bytearray(), closes

    def _abandon_tag(self) -> None:
        """What followed a marker was no tag: give it back as text."""
        if self._tag is not None:
            raw, self._tag = bytes(self._tag), None
            self._emit(self._utf8.decode(raw))

    def _end_text(self) -> None:
        """A marker ends the text before it: what is not a whole character by now never will be."""
        self._emit(self._utf8.decode(b"", final=True))

    def _end_tag(self) -> None:
        if self._tag is None:
            self._end_text()  # a separator that ends no tag
            return
        head, self._tag = self._tag.decode("utf-8", "replace"), None
        name = head.split(maxsplit=1)[0] if head.strip() else ""
        if self._tag_closes:
            self._on_close(name)
        else:
            attributes = _ATTRIBUTE.findall(head)
            self._on_open(name, {key: chat_xtml.unescape(value) for key, value in attributes})

    def _on_open(self, name: str, attributes: dict[str, str]) -> None:
        if name in _ELEMENTS:
            self._enter(_ELEMENTS[name])
        elif name == "call":
            self._enter("tools")
            self._start_call(attributes.get("tool", ""))
        elif name == "argument" and self._call is not None:
            self._call.open_argument(attributes.get("key", ""), attributes.get("type", ""))
        elif name == "json" and self._call is not None:
            self._call.open_json()

    def _on_close(self, name: str) -> None:
        if name == "think" and self._section == "think":
            self._section = "between"
        elif name == "response" and self._section == "think":
            self._content_out += self._reasoning
            self._section = "after"
        elif name in ("response", "tools", "message") and self._section != "think":
            self._enter("after")
        elif name in ("argument", "json") and self._call is not None:
            self._call.close_value()
        elif name == "call":
            self._end_call()

    def _enter(self, section: Section) -> None:
        self._end_call()
        self._section = section

    def _start_call(self, name: str) -> None:
        if not name or not self._tools_allowed:
            return
        index = self._calls
        self._calls += 1
        self._calls_out.append(CallDelta(index, "", self._call_id(name, index), name))
        self._call = CallWriter(lambda piece: self._send_arguments(index, piece), self._typed)

    def _send_arguments(self, index: int, piece: str) -> None:
        if self._calls_out and self._calls_out[-1].index == index:
            self._calls_out[-1].arguments += piece
        else:
            self._calls_out.append(CallDelta(index, piece))

    def _end_call(self) -> None:
        call, self._call = self._call, None
        if call is not None:
            call.close()

    def _emit(self, text: str) -> None:
        """Text of the innermost open element."""
        if self._section == "between":
            text = text.lstrip()  # tags may stand on lines of their own
        if not text:
            return
        if self._call is not None:
            self._call.text(text)
        elif self._section == "think":
            self._reasoning.append(text)
            self._reasoning_out.append(text)
        elif self._section in ("between", "response"):
            self._section = "response"
            self._content_out.append(text)
