"""A generated tool call as it is written: its arguments become JSON text piece by piece.

Text of a string argument goes on at once. Any other value goes on when it has ended, because only
then is it known to be JSON (a model's mistake becomes a JSON string); with `typed`, a grammar has
made sure, and it goes on at once as well. So what was sent is never taken back: of two arguments of
one name the first counts, and of arguments and a whole `json` object whichever came first.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass

from expertmesh.actors.model.chat_arguments import is_json

_SPACE = " \t\n\r"


@dataclass(slots=True)
class CallDelta:
    """What is new of call `index` (from 0). id and name: once, with the first piece. The pieces of
    `arguments`, joined, are JSON unless the answer was cut off, or the model wrote an unreadable
    `json` element."""

    index: int
    arguments: str = ""
    id: str = ""
    name: str = ""


class CallWriter:
    """One call. `send` gets each piece of its arguments."""

    def __init__(self, send: Callable[[str], None], typed: bool) -> None:
        self._send, self._typed = send, typed
        self._keys: set[str] = set()
        self._whole = False  # the arguments are one json element
        self._value: _Value | None = None

    def open_argument(self, key: str, kind: str) -> None:
        self.close_value()
        if self._whole or key in self._keys:
            self._value = _Value(_nowhere)
            return
        before = f"{', ' if self._keys else '{'}{_quoted(key)}: "
        self._keys.add(key)
        if kind == "string":
            self._send(before + '"')
            self._value = _Value(lambda piece: self._send(_quoted(piece)[1:-1]), after='"')
        elif self._typed:
            self._send(before)
            self._value = _Value(self._send)
        else:
            self._value = _Value(lambda text: self._send(before + _literal(text)), held=True)

    def open_json(self) -> None:
        self.close_value()
        send = _nowhere if self._whole or self._keys else self._send
        self._whole = not self._keys
        self._value = _Value(send, trimmed=True)

    def text(self, text: str) -> None:
        """Of the open value; outside of one there is nothing but space."""
        if self._value is not None:
            self._value.add(text)

    def close_value(self) -> None:
        value, self._value = self._value, None
        if value is not None:
            after = value.end()
            if after:
                self._send(after)

    def close(self) -> None:
        """The call is complete: what it has not closed is closed."""
        self.close_value()
        if not self._whole:
            self._send("}" if self._keys else "{}")


def _nowhere(piece: str) -> None:
    """What a model repeats is dropped."""


class _Value:
    """held: one piece at the end. trimmed: without the space around it. after: follows the end."""

    def __init__(
        self, send: Callable[[str], None], *, held: bool = False, trimmed: bool = False,
        after: str = "",
    ) -> None:  # fmt: skip
        self._send, self._held, self._trimmed, self._after = send, held, trimmed, after
        self._parts: list[str] = []
        self._begun = False

    def add(self, text: str) -> None:
        if self._held:
            self._parts.append(text)
            return
        if self._trimmed:
            text = "".join(self._parts) + text if self._begun else text.lstrip(_SPACE)
            kept = text.rstrip(_SPACE)
            self._parts = [text[len(kept) :]]
            text = kept
        self._begun = self._begun or bool(text)
        if text:
            self._send(text)

    def end(self) -> str:
        if self._held:
            self._send("".join(self._parts))
        return self._after


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _literal(text: str) -> str:
    return text.strip(_SPACE) if is_json(text) else _quoted(text)
