"""Whose cached state and sessions a request may use."""

from collections.abc import Mapping
from typing import Any

from expertmesh.deploy.auth.keys import ApiKey
from expertmesh.deploy.openai.errors import bad

SALT_HEADER = "x-cache-salt"
_SALT_LENGTH = 256


def header_salt(headers: Mapping[str, str]) -> str | None:
    """What the header says, None without it. Raises ApiError."""
    salt = headers.get(SALT_HEADER)
    if salt is not None and not 1 <= len(salt) <= _SALT_LENGTH:
        raise bad(f"{SALT_HEADER} must have 1 to {_SALT_LENGTH} characters", SALT_HEADER)
    return salt


def salt_body(body: dict[str, Any], headers: Mapping[str, str]) -> None:
    """Gives a body the header's salt as its cache_salt. Raises ApiError when it has another."""
    salt = header_salt(headers)
    if salt is None:
        return
    if body.get("cache_salt") not in (None, salt):
        raise bad(f"cache_salt and the header {SALT_HEADER} differ", "cache_salt", "invalid_value")
    body["cache_salt"] = salt


def tenant_of(key: ApiKey | None, cache_salt: str | None = None) -> str:
    """The name that keys all hash chains of the request. Injective: no key's name has a slash.

    What is before the first slash owns the tenant's sessions, and has the quota for them. key: None
    where no keys are needed: then everybody with the same salt is one tenant.
    """
    return f"{'' if key is None else key.name}/{cache_salt or ''}"
