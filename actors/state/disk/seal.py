"""Optional authenticated encryption of record bodies (kv-state 3.8 item 6).

A checksum finds accidents. Where others can write to the store, only a key finds forgeries: with
one, a record is AES-256-GCM sealed and its header is authenticated along with it.
"""

import os
from hashlib import blake2b

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from expertmesh.actors.state.disk.files import Buffer

# Of a secret.
LEAST_BYTES = 16
NONCE_BYTES = 12
TAG_BYTES = 16


class Seal:
    """secret: at least 16 bytes, of any form; all replicas that share a store have the same."""

    def __init__(self, secret: bytes) -> None:
        if len(secret) < LEAST_BYTES:
            raise ValueError(
                f"the store's secret has {len(secret)} bytes, at least {LEAST_BYTES} are needed"
            )
        key = blake2b(secret, digest_size=32, person=b"state-disk-seal").digest()
        self._cipher = AESGCM(key)

    def close(self, body: bytes, header: bytes) -> tuple[bytes, bytes]:
        """(nonce, ciphertext with its tag)."""
        nonce = os.urandom(NONCE_BYTES)
        return nonce, self._cipher.encrypt(nonce, body, header)

    def open(self, nonce: bytes, body: Buffer, header: bytes) -> bytes | None:
        """The plain body; None where it is not what `close` made for this header."""
        try:
            return self._cipher.decrypt(nonce, body, header)
        except InvalidTag:
            return None
