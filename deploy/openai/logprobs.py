"""Log-probabilities in the two shapes of the API, and how a token is spelled in them."""

from collections.abc import Sequence
from typing import Any

from expertmesh.actors.attention.messages import TokenLogprobs
from expertmesh.actors.model.tokenizer import Tokenizer

# JSON has no -Infinity; a masked token gets the floor that OpenAI and vLLM use.
FLOOR = -9999.0


def finite(logprob: float) -> float:
    """The log-probability, at least FLOOR. NaN (never expected) becomes the floor too."""
    return logprob if logprob > FLOOR else FLOOR


class TokenSpelling:
    """Token id to string. Part of a character is spelled as its bytes: replacement characters
    would make different tokens collide as keys of one object."""

    def __init__(self, tokenizer: Tokenizer | None, as_ids: bool) -> None:
        self._tokenizer = None if as_ids else tokenizer

    def __call__(self, token: int) -> str:
        if self._tokenizer is None:
            return f"token_id:{token}"
        raw = self._tokenizer.token_bytes(token)
        try:
            return raw.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)

    def raw(self, token: int) -> list[int] | None:
        return None if self._tokenizer is None else list(self._tokenizer.token_bytes(token))


class CompletionLogprobs:
    """Four parallel arrays. Offsets count characters of the choice's text, echo included."""

    __slots__ = ("_spell", "_top", "offsets", "token_logprobs", "tokens", "tops")

    def __init__(self, spell: TokenSpelling, top: int) -> None:
        self._spell = spell
        self._top = top
        self.clear()

    def clear(self) -> None:
        self.tokens: list[str] = []
        self.token_logprobs: list[float | None] = []
        self.tops: list[dict[str, float] | None] = []
        self.offsets: list[int] = []

    def add(self, token: int, entry: TokenLogprobs | None, offset: int) -> None:
        """entry None: the first prompt token, which nothing predicts."""
        spelled = self._spell(token)
        self.tokens.append(spelled)
        self.offsets.append(offset)
        if entry is None:
            self.token_logprobs.append(None)
            self.tops.append(None)
            return
        self.token_logprobs.append(finite(entry.logprob))
        top = {self._spell(other): finite(value) for other, value in entry.top[: self._top]}
        top.setdefault(spelled, finite(entry.logprob))
        self.tops.append(top)

    def take(self) -> dict[str, Any]:
        """What was added since the last take, as the API object."""
        out = {
            "text_offset": self.offsets,
            "token_logprobs": self.token_logprobs,
            "tokens": self.tokens,
            "top_logprobs": self.tops,
        }
        self.clear()
        return out


def chat_logprobs(
    entries: Sequence[TokenLogprobs], spell: TokenSpelling, top: int
) -> list[dict[str, Any]]:
    """The `content` list of a chat choice's logprobs."""

    def one(token: int, logprob: float) -> dict[str, Any]:
        return {"token": spell(token), "logprob": finite(logprob), "bytes": spell.raw(token)}

    return [
        one(entry.token_id, entry.logprob)
        | {"top_logprobs": [one(other, value) for other, value in entry.top[:top]]}
        for entry in entries
    ]
