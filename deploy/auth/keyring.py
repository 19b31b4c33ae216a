"""The keys that are valid now: of settings, and of a file that is read again when it changes."""

import asyncio
import base64
import binascii
import hashlib
import hmac
import logging
import os
import time
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal

from expertmesh.deploy.auth.keys import (
    ApiKey,
    KeysError,
    check_key,
    from_hash,
    hash_key,
    parse_keys,
)
from expertmesh.deploy.edge_settings import AuthSettings

_log = logging.getLogger(__name__)

ENVIRONMENT = "EXPERTMESH_API_KEYS"
# How often at most the file is looked at, and how large it may be.
CHECK_SECONDS = 1.0
FILE_BYTES = 16 << 20
# A file that changed less than this ago may change again within the same tick of its clock.
_SETTLED_NS = 2_000_000_000

Failure = Literal["missing", "unknown", "expired"]


class KeyRefused(Exception):
    """Why a request has no valid key. The message is for whoever sent it."""

    def __init__(self, reason: Failure, message: str) -> None:
        super().__init__(message)
        self.reason: Failure = reason
        self.message = message


class Keyring:
    """Lives on one event loop. `failed`: the file can not be used as it is now, and the keys are
    those that it had before."""

    def __init__(self, settings: AuthSettings, clock: Callable[[], float] = time.monotonic) -> None:
        """Raises KeysError: a server does not start with keys that it can not read."""
        self._fixed = tuple(from_hash(hashed) for hashed in settings.key_hashes)
        self._file, self._clock = settings.keys_file, clock
        self._checked = clock()
        self._seen: tuple[int, ...] | None = None
        self._reading: asyncio.Task[None] | None = None
        self.failed = ""
        self._set(() if self._file is None else self._read(self._file))

    def _set(self, of_file: tuple[ApiKey, ...]) -> None:
        # A key that is in both has the limits that the file gives it.
        known = {key.hash for key in of_file}
        fixed = [key for key in self._fixed if key.hash not in known]
        self._keys = tuple((key.digest, key) for key in (*fixed, *of_file))

    @property
    def usable(self) -> int:
        """How many keys would be accepted now."""
        now = datetime.now(UTC)
        return sum(key.usable(now) for _, key in self._keys)

    async def authenticate(self, authorization: str | None, *, basic: bool = False) -> ApiKey:
        """The key that an Authorization header bears. basic: it may also be the password of HTTP
        Basic. Raises KeyRefused."""
        await self._refresh()
        given = _borne(authorization, basic)
        if given is None:
            wanted = "an Authorization header with `Bearer` and an API key is needed"
            raise KeyRefused("missing", wanted)
        digest, found = hashlib.sha256(given.encode("latin-1", "replace")).digest(), None
        for one, key in self._keys:  # all of them, whichever it is: time must not tell
            if hmac.compare_digest(one, digest):
                found = key
        if found is None:
            raise KeyRefused("unknown", "the API key is not valid")
        if not found.usable(datetime.now(UTC)):
            what = "is disabled" if found.disabled else "has expired"
            raise KeyRefused("expired", f"the API key {what}")
        return found

    async def _refresh(self) -> None:
        """Returns when the keys are those of the file as it was at most CHECK_SECONDS ago."""
        if self._file is None:
            return
        if self._reading is None and self._clock() - self._checked >= CHECK_SECONDS:
            self._checked = self._clock()
            if _signature(self._file) != self._seen or self._seen is None:
                self._reading = asyncio.create_task(self._reload(self._file))
        if self._reading is not None:
            # Also who comes meanwhile waits: a key that was taken out is not valid once more.
            await asyncio.shield(self._reading)

    async def _reload(self, path: Path) -> None:
        try:
            keys = await asyncio.to_thread(self._read, path)
        except KeysError as error:
            if self.failed != str(error):
                _log.error("%s; the keys that were valid before stay valid", error)
            self.failed = str(error)
        else:
            self.failed = ""
            self._set(keys)
        finally:
            self._reading = None

    def _read(self, path: Path) -> tuple[ApiKey, ...]:
        """Raises KeysError naming the file."""
        before = _signature(path)
        try:
            with path.open("rb") as file:
                data = file.read(FILE_BYTES + 1)
            if len(data) > FILE_BYTES:
                raise KeysError(f"more than {FILE_BYTES} bytes")
            keys = parse_keys(data)
        except OSError as error:
            self._seen = None
            raise KeysError(f"keys file {path}: {error.strerror or 'can not be read'}") from None
        except KeysError as error:
            self._seen = before
            raise KeysError(f"keys file {path}: {error}") from None
        self._seen = before
        return keys


def _signature(path: Path) -> tuple[int, ...] | None:
    """What changes when the file does: written in place, replaced, or its link pointed elsewhere.
    None: not known, or so fresh that the next change may look the same."""
    try:
        found = os.stat(path)
    except OSError:
        return None
    if abs(time.time_ns() - found.st_mtime_ns) < _SETTLED_NS:
        return None
    return (found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns)


def _borne(authorization: str | None, basic: bool) -> str | None:
    """What the header gives as a key."""
    scheme, _, value = (authorization or "").strip().partition(" ")
    value = value.strip()
    if scheme.lower() == "bearer" and value:
        return value
    if basic and scheme.lower() == "basic":
        try:
            pair = base64.b64decode(value, validate=True).decode("utf-8")
        except (binascii.Error, UnicodeDecodeError):
            return None
        return pair.partition(":")[2] or None
    return None


def open_keyring(settings: AuthSettings) -> Keyring | None:
    """None when no keys are configured: everybody may come in. Raises KeysError."""
    if settings.keys_file is None and not settings.key_hashes:
        return None
    return Keyring(settings)


def environment_hashes(environment: Mapping[str, str]) -> tuple[str, ...]:
    """Hashes of the keys in EXPERTMESH_API_KEYS, which commas separate. Raises KeysError when it is
    set and holds none: nobody who sets it means an open server."""
    if ENVIRONMENT not in environment:
        return ()
    keys = [key for key in environment[ENVIRONMENT].split(",") if key.strip()]
    if not keys:
        raise KeysError(f"{ENVIRONMENT} is set and holds no key; unset it to serve without keys")
    checked = [check_key(key, f"key {n} of {ENVIRONMENT}") for n, key in enumerate(keys, start=1)]
    return tuple(dict.fromkeys(hash_key(key) for key in checked))
