"""Text to token ids and back, for the tiktoken files of Kimi checkpoints (k3-model.md 4.1).

Ids 0..ranks-1 are byte sequences. Every id from there up to vocab_size - 1 is reserved, whether
the tokenizer files mention it or not (the embedding may have more rows than the tokenizer has
names): it decodes as its name in `added_tokens_decoder`, else as `<|reserved_token_{id}|>`.
A reserved id counts as special unless the file says `"special": false`.
"""

import codecs
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Protocol

import tiktoken

from expertmesh.actors.model.tokenizer_files import (
    AddedToken,
    TokenizerError,
    read_added_tokens,
    read_ranks,
)

__all__ = ["PATTERN", "IncrementalDetokenizer", "Tokenizer", "TokenizerError"]

MODEL_FILE = "tiktoken.model"
CONFIG_FILE = "tokenizer_config.json"

_CASELESS = r"\p{Lm}\p{Lo}\p{M}"
_UPPER = rf"[\p{{Lu}}\p{{Lt}}{_CASELESS}&&[^\p{{Han}}]]"
_LOWER = rf"[\p{{Ll}}{_CASELESS}&&[^\p{{Han}}]]"
_SUFFIX = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
# The pre-tokeniser, in the Rust regex syntax of tiktoken (`&&` intersects sets).
PATTERN = "|".join(
    (
        r"[\p{Han}]+",
        rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_SUFFIX}",
        rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_SUFFIX}",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    )
)

# The regex engine backtracks and BPE grows faster than linearly, so very long text is cut first.
# The cuts are part of the format: where they fall decides the tokens.
MAX_CHARS = 400_000
MAX_RUN = 25_000
_LONG_RUN = re.compile(rf"\s{{{MAX_RUN + 1},}}|\S{{{MAX_RUN + 1},}}")


class HasVocabSize(Protocol):
    """What the tokenizer needs from a ModelConfig."""

    @property
    def vocab_size(self) -> int: ...


class Tokenizer:
    """Immutable and safe to share between threads. ordinary: ids below it are text, the others
    reserved."""

    def __init__(
        self, tokens: Sequence[bytes], added: Mapping[int, AddedToken], vocab_size: int
    ) -> None:
        """Use `load`; this takes tables that have been checked already.

        Args:
            tokens: bytes of each rank.
            added: names of ids above the ranks.
            vocab_size: rows of the model's embedding.
        """
        self.vocab_size = vocab_size
        self.ordinary = len(tokens)
        self.size = max([len(tokens), *(token_id + 1 for token_id in added)])
        names = {
            token_id: added[token_id].content
            if token_id in added
            else f"<|reserved_token_{token_id}|>"
            for token_id in range(len(tokens), vocab_size)
        }
        self._bytes = [*tokens, *(name.encode() for name in names.values())]
        self._special = frozenset(
            token_id for token_id in names if token_id not in added or added[token_id].special
        )
        self._ids = {token.content: token_id for token_id, token in added.items()}
        ranks = {token: rank for rank, token in enumerate(tokens)}
        self._encoding = tiktoken.Encoding(
            "kimi", pat_str=PATTERN, mergeable_ranks=ranks, special_tokens={}
        )

    @classmethod
    def load(cls, folder: str | Path, config: HasVocabSize) -> "Tokenizer | None":
        """The tokenizer of a checkpoint folder, or None when it has no `tiktoken.model`.

        Raises:
            TokenizerError: a file is broken or does not fit config.vocab_size.
        """
        path = Path(folder) / MODEL_FILE
        if not path.exists():
            return None
        tokens = read_ranks(path, config.vocab_size)
        added = read_added_tokens(Path(folder) / CONFIG_FILE, len(tokens), config.vocab_size)
        return cls(tokens, added, config.vocab_size)

    def encode(self, text: str) -> list[int]:
        """Token ids of literal text: `<|open|>` in it is eight characters, never a control token.

        Half surrogate pairs (legal in JSON, not in UTF-8) become U+FFFD.
        """
        ids: list[int] = []
        for piece in cut_long_text(text):
            ids += self._encoding.encode_ordinary(piece)
        return ids

    def decode(self, ids: Sequence[int], skip_special: bool = False) -> str:
        """Text of ids; bytes that are not UTF-8 become U+FFFD.

        Raises:
            ValueError: an id outside 0..vocab_size-1.
        """
        return self.decode_bytes(ids, skip_special).decode("utf-8", "replace")

    def decode_bytes(self, ids: Sequence[int], skip_special: bool = False) -> bytes:
        """Like `decode`, before UTF-8 decoding."""
        special = self._special if skip_special else frozenset()
        return b"".join([self.token_bytes(token_id) for token_id in ids if token_id not in special])

    def token_bytes(self, token_id: int) -> bytes:
        """The exact bytes of one id, which may be part of a character."""
        if not 0 <= token_id < self.vocab_size:
            raise ValueError(f"token id {token_id} is outside the vocabulary of {self.vocab_size}")
        return self._bytes[token_id]

    def token_text(self, token_id: int) -> str:
        """One id as text, for logprobs; partial characters show as U+FFFD."""
        return self.token_bytes(token_id).decode("utf-8", "replace")

    def special_id(self, name: str) -> int | None:
        """The id that `added_tokens_decoder` names so (special or not), else None."""
        return self._ids.get(name)

    def is_special(self, token_id: int) -> bool:
        """Whether skip_special drops this id."""
        return token_id in self._special


def cut_long_text(text: str) -> Iterator[str]:
    """Pieces of at most MAX_CHARS, in which no run of (non-)whitespace exceeds MAX_RUN."""
    for begin in range(0, len(text), MAX_CHARS):
        block = text[begin : begin + MAX_CHARS]
        start = 0
        for run in _LONG_RUN.finditer(block) if len(block) > MAX_RUN else ():
            for cut in range(run.start() + MAX_RUN, run.end(), MAX_RUN):
                yield block[start:cut]
                start = cut
        yield block[start:]


class IncrementalDetokenizer:
    """Turns a stream of ids into text without ever showing half a character.

    The pieces returned by `push` and `finish`, joined, equal `Tokenizer.decode` of all ids.
    """

    def __init__(self, tokenizer: Tokenizer, skip_special: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skip_special = skip_special
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, ids: Sequence[int]) -> str:
        """The text that these ids complete; an unfinished character waits for its other bytes."""
        return self._utf8.decode(self._tokenizer.decode_bytes(ids, self._skip_special))

    def finish(self) -> str:
        """What was still waiting: "" or one U+FFFD. Call once, at the end."""
        return self._utf8.decode(b"", final=True)
