"""A byte-level tokenizer in K3's file format: 256 one-byte ranks, then K3's 256 specials."""

import base64
import json
from pathlib import Path

RANKS = 256
# Offsets of the named specials from the first reserved id, as in K3 (k3-model.md 4.1); the three
# XTML markers are the only ones with special=false.
SPECIALS = {
    0: "[BOS]", 1: "[EOS]", 2: "<|end_of_msg|>", 3: "<|open|>", 4: "<|close|>", 5: "<|sep|>",
    6: "[start_header_id]", 7: "[end_header_id]", 9: "[EOT]", 18: "<|media_begin|>",
    19: "<|media_content|>", 20: "<|media_end|>", 21: "<|media_pad|>", 65: "<osagent_mode>",
    254: "[UNK]", 255: "[PAD]",
}  # fmt: skip
_NOT_SPECIAL = {3, 4, 5}

SPECIAL_IDS = {
    "bos_token_id": RANKS,
    "eos_token_id": RANKS + 2,
    "pad_token_id": RANKS + 255,
}


def write_tokenizer(folder: Path) -> None:
    """Write tiktoken.model and tokenizer_config.json (vocabulary 512) into `folder`."""
    lines = [f"{base64.b64encode(bytes([i])).decode()} {i}\n" for i in range(RANKS)]
    (folder / "tiktoken.model").write_text("".join(lines))
    added = {
        str(RANKS + offset): {
            "content": text,
            "lstrip": False,
            "normalized": False,
            "rstrip": False,
            "single_word": False,
            "special": offset not in _NOT_SPECIAL,
        }
        for offset, text in SPECIALS.items()
    }
    config = {
        "added_tokens_decoder": added,
        "auto_map": {"AutoTokenizer": ["tokenization_kimi.TikTokenTokenizer", None]},
        "bos_token": "[BOS]",
        "eos_token": "[EOS]",
        "pad_token": "[PAD]",
        "unk_token": "[UNK]",
        "model_max_length": 1048576,
        "tokenizer_class": "TikTokenTokenizer",
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2))
