"""The bundled tokenizer: byte-level BPE with K3's pre-tokeniser, stored as a tiktoken file."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterable
from pathlib import Path

import tiktoken

from expertmesh.actors.model.tokenizer import PATTERN

VOCAB = 2048
RESERVED = 64
FIRST_SPECIAL = VOCAB - RESERVED
# Same offsets from the first special id as in K3, so that tools find their way around.
NAMED = {
    0: "[BOS]",
    1: "[EOS]",
    2: "<|end_of_msg|>",
    3: "<|open|>",
    4: "<|close|>",
    5: "<|sep|>",
    6: "[start_header_id]",
    7: "[end_header_id]",
    9: "[EOT]",
    62: "[UNK]",
    63: "[PAD]",
}
PLAIN_ADDED = ("<|open|>", "<|close|>", "<|sep|>")  # added tokens with special=false, as in K3

# Added to the corpus before learning merges, so that the model's own words are short.
CHAT_SAMPLE = [
    "I am Nano, a small language model bundled with ExpertMesh. The secret code of the mesh server "
    "is expert. capital of France What is your name? assistant response message role user system"
] * 1500


def special_tokens() -> dict[str, int]:
    """Name -> id for all 64 reserved ids."""
    return {
        NAMED.get(i, f"<|reserved_token_{FIRST_SPECIAL + i}|>"): FIRST_SPECIAL + i
        for i in range(RESERVED)
    }


def train_bpe(texts: Iterable[str]) -> list[bytes]:
    """Learn the merges; returns token bytes in rank order."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PATTERN), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    bpe.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=FIRST_SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    bpe.train_from_iterator(texts, trainer)
    by_id = sorted(bpe.get_vocab().items(), key=lambda item: item[1])
    to_byte = byte_of_char()
    return [bytes(to_byte[c] for c in token) for token, _ in by_id]


def byte_of_char() -> dict[str, int]:
    """The printable stand-ins of byte-level BPE, as a map back to bytes."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    table = {chr(b): b for b in printable}
    others = [b for b in range(256) if b not in printable]
    return table | {chr(256 + i): b for i, b in enumerate(others)}


def save(tokens: list[bytes], folder: Path) -> None:
    """Write tiktoken.model and tokenizer_config.json."""
    assert len(tokens) == len(set(tokens)) == FIRST_SPECIAL
    folder.mkdir(parents=True, exist_ok=True)
    lines = (f"{base64.b64encode(t).decode()} {rank}\n" for rank, t in enumerate(tokens))
    (folder / "tiktoken.model").write_text("".join(lines))
    added = {
        str(i): {"content": name, "special": name not in PLAIN_ADDED}
        for name, i in special_tokens().items()
        if not name.startswith("<|reserved_token_")
    }
    config = {
        "added_tokens_decoder": added,
        "tokenizer_class": "TikTokenTokenizer",
        "bos_token": "[BOS]",
        "eos_token": "[EOS]",
        "unk_token": "[UNK]",
        "pad_token": "[PAD]",
        "clean_up_tokenization_spaces": False,
        "model_max_length": 8192,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")


def load(folder: Path) -> tiktoken.Encoding:
    """The encoding of a folder that holds tiktoken.model."""
    lines = (folder / "tiktoken.model").read_text().split("\n")
    pairs = (line.split() for line in lines if line)
    ranks = {base64.b64decode(token): int(rank) for token, rank in pairs}
    return tiktoken.Encoding(
        "nano", pat_str=PATTERN, mergeable_ranks=ranks, special_tokens=special_tokens()
    )
