"""What a piece of state is called: a keyed hash chain over everything that made it.

K_i = BLAKE2b-256(K_{i-1}, tokens_i, switches), K_0 = the model's fingerprint and the tenant
(kv-state 3.1). Nothing of the instance is in it: no rank, port, size, or process seed, so a
restarted server and a neighbour find the same names.

Prompt tokens take the prefill path and generated ones the decode path, whose bits differ. A key
therefore says at which positions the path changed. Nothing is said of changes behind a page's end,
so that a page inside the prompt has one name whatever follows.
"""

import struct
from collections.abc import Sequence
from hashlib import blake2b

from expertmesh.actors.model.batch import PAGE_TOKENS

KEY_BYTES = 32
# Part of every root: raise it when the meaning of stored bytes changes.
FORMAT = b"expertmesh-state-2"


def root_key(fingerprint: bytes, tenant: str = "", mode: str = "exact") -> bytes:
    """K_0 of one tenant's chains. Tenants cannot meet each other's: the salt keys the hash.

    fingerprint: of weights, tokenizer, layout and dtype. mode: how the state was computed, where
    that is not exactly.
    """
    salt = blake2b(tenant.encode(), digest_size=KEY_BYTES, person=b"tenant").digest()
    return blake2b(
        FORMAT + _sized(fingerprint) + _sized(mode.encode()), digest_size=KEY_BYTES, key=salt
    ).digest()


def extend(parent: bytes, tokens: Sequence[int], end: int, switches: Sequence[int] = ()) -> bytes:
    """The key of the state after `tokens`, which follow what `parent` names and end at position
    `end`. switches: ascending positions at which the path changed, first to decode."""
    passed = [at for at in switches if at < end]
    words = struct.pack(f"<{len(tokens)}I{len(passed)}Q", *tokens, *passed)
    head = struct.pack("<HH", len(tokens), len(passed))
    return blake2b(parent + head + words, digest_size=KEY_BYTES).digest()


def chain(root: bytes, tokens: Sequence[int], switches: Sequence[int] = ()) -> list[bytes]:
    """Keys of all whole pages of `tokens`, in order."""
    keys: list[bytes] = []
    grow(keys, root, tokens, len(tokens) // PAGE_TOKENS, switches)
    return keys


def grow(
    keys: list[bytes], root: bytes, tokens: Sequence[int], pages: int, switches: Sequence[int]
) -> None:
    """Appends to the chain's keys until there are those of `pages` pages."""
    while len(keys) < pages:
        begin = len(keys) * PAGE_TOKENS
        end = begin + PAGE_TOKENS
        keys.append(extend(keys[-1] if keys else root, tokens[begin:end], end, switches))


def named_key(root: bytes, kind: bytes, name: str) -> bytes:
    """The key of something that a tenant has named, such as a session."""
    return blake2b(kind + b"\0" + name.encode(), digest_size=KEY_BYTES, key=root).digest()


def _sized(part: bytes) -> bytes:
    return struct.pack("<I", len(part)) + part
