"""A model's tokens as llguidance wants them: bytes, which of them are special, which end a text."""

from collections.abc import Iterable, Sequence

import msgspec
from llguidance import LLTokenizer, TokenizerWrapper

from expertmesh.actors.model.tokenizer import Tokenizer


class Vocabulary(msgspec.Struct, frozen=True):
    """tokens: the bytes of every id. ordinary: ids below it are text, all others special, and a
    grammar names them, as in `<|open|>`. end_ids: those that may stand where a text is complete.
    """

    tokens: list[bytes]
    ordinary: int
    end_ids: list[int]


def vocabulary_of(tokenizer: Tokenizer, end_ids: Iterable[int] = ()) -> Vocabulary:
    """end_ids: the model's own. A model that has none ends constrained texts with its last id."""
    size = tokenizer.vocab_size
    ends = sorted(set(end_ids)) or [size - 1]
    return Vocabulary([tokenizer.token_bytes(i) for i in range(size)], tokenizer.ordinary, ends)


class _Tokens:
    """The object that TokenizerWrapper wraps. It also wants to tokenise, for a feature (forcing)
    that is off here: bytes are good enough."""

    bos_token_id = None

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.tokens: Sequence[bytes] = vocabulary.tokens
        self.special_token_ids = list(range(vocabulary.ordinary, len(vocabulary.tokens)))
        self.eos_token_id = vocabulary.end_ids[0]
        self._ids = {token: i for i, token in enumerate(vocabulary.tokens[: vocabulary.ordinary])}

    def __call__(self, text: bytes) -> list[int]:
        return [self._ids[byte] for i in range(len(text)) if (byte := text[i : i + 1]) in self._ids]


def build(vocabulary: Vocabulary) -> LLTokenizer:
    """Takes half a second for K3's 163,840 tokens; what is made of it is immutable."""
    return LLTokenizer(TokenizerWrapper(_Tokens(vocabulary)), eos_token=vocabulary.end_ids)
