"""The two tokenizer files of a Kimi checkpoint, read and checked line by line.

`tiktoken.model`: one `base64(token bytes) rank` pair per line, ranks 0, 1, 2, ...
`tokenizer_config.json`: `added_tokens_decoder` names the ids above the ranks.
Both come from outside, so a broken file is a TokenizerError that says where, never a later crash
inside the BPE code (which panics on a missing byte).
"""

import base64
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any


class TokenizerError(ValueError):
    """A tokenizer file that cannot be used. The message names the file and the line or key."""


@dataclass(frozen=True, slots=True)
class AddedToken:
    """One named id above the ranks. `special` ids vanish from text decoded with skip_special."""

    content: str
    special: bool


def read_ranks(path: Path, vocab_size: int) -> list[bytes]:
    """Token bytes in rank order.

    Raises:
        TokenizerError: a line is not `base64 rank`, a rank or token comes twice or out of order,
            one of the 256 single bytes is missing, or there are more tokens than vocab_size.
    """
    tokens: list[bytes] = []
    seen: dict[bytes, int] = {}
    try:
        lines = path.read_bytes().split(b"\n")
    except OSError as error:
        raise TokenizerError(f"{path}: cannot read: {error}") from error
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        where = f"{path}:{number}"
        fields = line.split()
        if len(fields) != 2:
            raise TokenizerError(f"{where}: expected `base64 rank`, found {len(fields)} fields")
        try:
            token, rank = base64.b64decode(fields[0], validate=True), int(fields[1])
        except ValueError as error:
            raise TokenizerError(f"{where}: expected `base64 rank`: {error}") from error
        if rank != len(tokens):
            raise TokenizerError(f"{where}: rank {rank} found where {len(tokens)} comes next")
        if not token:
            raise TokenizerError(f"{where}: empty token")
        if token in seen:
            raise TokenizerError(f"{where}: the same token already has rank {seen[token]}")
        if rank >= vocab_size:
            raise TokenizerError(f"{where}: rank {rank} does not fit vocab_size {vocab_size}")
        seen[token] = rank
        tokens.append(token)
    missing = next((byte for byte in range(256) if bytes([byte]) not in seen), None)
    if missing is not None:
        raise TokenizerError(f"{path}: no token for the single byte 0x{missing:02x}")
    return tokens


def read_added_tokens(path: Path, first: int, vocab_size: int) -> dict[int, AddedToken]:
    """`added_tokens_decoder` by id; empty when the file does not exist.

    Args:
        first: the first id above the ranks; names below it would shadow ordinary tokens.

    Raises:
        TokenizerError: not JSON, a malformed entry, an id outside [first, vocab_size), or one
            name for two ids.
    """
    if not path.exists():
        return {}
    try:
        config: Any = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise TokenizerError(f"{path}: not readable as JSON: {error}") from error
    entries = config.get("added_tokens_decoder", {}) if isinstance(config, dict) else None
    if not isinstance(entries, dict):
        raise TokenizerError(f"{path}: added_tokens_decoder must be an object")
    added: dict[int, AddedToken] = {}
    owner: dict[str, int] = {}
    for key, entry in entries.items():
        where = f"{path}: added_tokens_decoder[{key!r}]"
        content = entry.get("content") if isinstance(entry, dict) else None
        special = entry.get("special", False) if isinstance(entry, dict) else None
        if not (key.isascii() and key.isdigit()):
            raise TokenizerError(f"{where}: the key must be a token id")
        if not isinstance(content, str) or not content or not isinstance(special, bool):
            raise TokenizerError(f"{where}: needs a non-empty `content` and a boolean `special`")
        token_id = int(key)
        if not first <= token_id < vocab_size:
            raise TokenizerError(
                f"{where}: id must be above the ranks and inside vocab_size: "
                f"{first}..{vocab_size - 1}"
            )
        if content in owner:
            raise TokenizerError(f"{where}: {content!r} already names id {owner[content]}")
        owner[content] = token_id
        added[token_id] = AddedToken(content, special)
    return added
