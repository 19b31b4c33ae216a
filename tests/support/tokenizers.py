"""Tiny byte-level tokenizer files with the special tokens of K3 or of the 48B."""

import base64
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

# Each is made of two earlier tokens, so that BPE can reach it.
MERGES = (
    "th", "he", "in", "er", "an", "on", "re", " t", " a", " th", " the", "the", "ing", "and",
    " an", " and", "me", "ss", "mess", "ag", "age", "message", "se", "onse", "ll",
    "hell", "hello", "  ",
)  # fmt: skip
K3_NAMES = {
    0: "[BOS]", 1: "[EOS]", 2: "<|end_of_msg|>", 3: "<|open|>", 4: "<|close|>", 5: "<|sep|>",
    6: "[start_header_id]", 7: "[end_header_id]", 9: "[EOT]",
}  # fmt: skip
K2_NAMES = {
    0: "[BOS]", 1: "[EOS]", 2: "<|im_end|>", 3: "<|im_user|>", 4: "<|im_assistant|>",
    5: "<|im_system|>", 6: "<|im_middle|>", 9: "[EOT]",
}  # fmt: skip
PLAIN = ("<|open|>", "<|close|>", "<|sep|>")
RESERVED = 16

Format = Literal["kimi_k3", "kimi_k2", "none"]


@dataclass(frozen=True)
class Vocabulary:
    """Stands in for a ModelConfig where only the size matters."""

    vocab_size: int


def special_names(vocab_size: int, chat: Format = "kimi_k3") -> dict[str, int]:
    """Name -> id. The named specials stand in the last RESERVED ids, in the published order."""
    if chat == "none":
        return {}
    first = vocab_size - RESERVED
    names = K3_NAMES if chat == "kimi_k3" else K2_NAMES
    return {name: first + i for i, name in names.items()} | {
        "[UNK]": vocab_size - 2,
        "[PAD]": vocab_size - 1,
    }


def write_tokenizer(folder: Path, vocab_size: int = 320, chat: Format = "kimi_k3") -> Path:
    """Write tiktoken.model and tokenizer_config.json.

    Ranks: the 256 bytes in order (id = byte value), then as many MERGES as fit. Ids between the
    last merge and the named specials stay unnamed. vocab_size must be at least 272.
    """
    assert vocab_size >= 256 + RESERVED
    merges = [merge.encode() for merge in MERGES[: vocab_size - 256 - RESERVED]]
    tokens = [bytes([byte]) for byte in range(256)] + merges
    lines = (f"{base64.b64encode(token).decode()} {i}\n" for i, token in enumerate(tokens))
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tiktoken.model").write_text("".join(lines))
    added = {
        str(token_id): {"content": name, "special": name not in PLAIN}
        for name, token_id in special_names(vocab_size, chat).items()
    }
    config = {"added_tokens_decoder": added, "tokenizer_class": "TikTokenTokenizer"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder
