"""API keys: how they are made, kept as hashes, and written in a file.

A key is 256 random bits, so one SHA-256 keeps it: there is no dictionary to try. No error of this
module repeats what it read; somebody may have put a key where its hash belongs.
"""

import hashlib
import secrets
from datetime import UTC, date, datetime, time
from typing import Annotated, Any

import orjson
import yaml
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

KEY_PREFIX = "em-"
HASH_PATTERN = r"^sha256:[0-9a-f]{64}$"
# A value that this pattern refuses could be anything, so the message only says what is right.
HASH_WANTED = "must be sha256: and 64 hexadecimal digits, as `expertmesh keys hash` prints it"


class KeysError(ValueError):
    """Keys that can not be used. The message names place and field, never a value."""


def new_key() -> str:
    """A fresh key of 256 random bits."""
    return KEY_PREFIX + secrets.token_urlsafe(32)


def hash_key(key: str) -> str:
    """As it stands in a keys file: "sha256:" and the digest of the key's UTF-8 bytes in hex."""
    return "sha256:" + hashlib.sha256(key.encode("utf-8", "surrogateescape")).hexdigest()


def check_key(key: str, where: str) -> str:
    """The key without white space around it. Raises KeysError when no HTTP header can carry it."""
    key = key.strip()
    if not key or not all("!" <= character <= "~" for character in key):
        raise KeysError(f"{where} must be printable ASCII characters without spaces")
    return key


def _moment(value: Any) -> Any:
    """YAML knows days and times without a zone: those are UTC, a day begins at midnight."""
    if isinstance(value, str):
        try:
            value = datetime.fromisoformat(value)
        except ValueError:
            raise ValueError("must be a date such as 2027-01-31 or 2027-01-31T12:00:00Z") from None
    if isinstance(value, datetime):
        return value if value.tzinfo is not None else value.replace(tzinfo=UTC)
    if isinstance(value, date):
        return datetime.combine(value, time(), UTC)
    raise ValueError("must be a date such as 2027-01-31 or 2027-01-31T12:00:00Z")


class ApiKey(BaseModel):
    """One entry of a keys file: whose key it is, and what it may do.

    Limits hold for one front door. priority: the smallest number, that is the greatest urgency,
    that its requests may ask for; a smaller one is served as this one.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", hide_input_in_errors=True)

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9._@-]{1,64}$")]
    hash: Annotated[str, Field(pattern=HASH_PATTERN, repr=False)]
    requests_in_flight: Annotated[int, Field(ge=1, strict=True)] | None = None
    requests_per_minute: Annotated[int, Field(ge=1, strict=True)] | None = None
    tokens_per_minute: Annotated[int, Field(ge=1, strict=True)] | None = None
    priority: Annotated[int, Field(strict=True)] | None = None
    expires: Annotated[datetime, BeforeValidator(_moment)] | None = None
    disabled: Annotated[bool, Field(strict=True)] = False

    @property
    def digest(self) -> bytes:
        return bytes.fromhex(self.hash.removeprefix("sha256:"))

    def usable(self, now: datetime) -> bool:
        return not self.disabled and (self.expires is None or now < self.expires)

    def limits(self) -> dict[str, Any]:
        """What is set besides name and hash, for people to read."""
        return self.model_dump(mode="json", exclude={"name", "hash"}, exclude_defaults=True)


def file_line(name: str, hashed: str) -> str:
    """An entry that can be appended to a keys file of either form. Raises KeysError."""
    entry = _entry({"name": name, "hash": hashed}, "the key")
    return orjson.dumps({"name": entry.name, "hash": entry.hash}).decode()


def from_hash(hashed: str) -> ApiKey:
    """A key without a name of its own, called by the beginning of its hash."""
    return ApiKey(name=f"key-{hashed.removeprefix('sha256:')[:8]}", hash=hashed)


def parse_keys(data: bytes) -> tuple[ApiKey, ...]:
    """The keys of a file: JSON lines, or YAML with a list or `keys: [...]`. Raises KeysError, also
    for a file without any: one that is being written looks like that."""
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError:
        raise KeysError("not UTF-8 text") from None
    entries = _json_lines(text) or _yaml(text)
    if not entries:
        raise KeysError("no keys in it")
    keys = tuple(_entry(entry, where) for where, entry in entries)
    for field in ("name", "hash"):
        seen: set[str] = set()
        for (where, _), key in zip(entries, keys, strict=True):
            value = getattr(key, field)
            if value in seen:
                raise KeysError(f"{where}: another key has the same {field}")
            seen.add(value)
    return keys


def _json_lines(text: str) -> list[tuple[str, Any]]:
    """(where, entry) of each line; nothing when it is not that kind of file."""
    lines = [(number, line.strip()) for number, line in enumerate(text.splitlines(), start=1)]
    lines = [(number, line) for number, line in lines if line and not line.startswith("#")]
    if not all(line.startswith("{") and line.endswith("}") for _, line in lines):
        return []
    entries: list[tuple[str, Any]] = []
    for number, line in lines:
        try:
            entries.append((f"line {number}", orjson.loads(line)))
        except orjson.JSONDecodeError:
            raise KeysError(f"line {number} is not JSON") from None
    return entries


def _yaml(text: str) -> list[tuple[str, Any]]:
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    try:
        given = yaml.load(text, loader)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        at = "" if mark is None else f" at line {mark.line + 1}"
        raise KeysError(f"neither JSON lines nor YAML{at}") from None
    except (ValueError, OverflowError, RecursionError):  # 2027-02-31, a number out of bounds, ...
        raise KeysError("not YAML that can be read") from None
    if isinstance(given, dict) and set(given) == {"keys"}:
        given = given["keys"]
    if given is not None and not isinstance(given, list):
        raise KeysError("must be a list of keys, or `keys:` with one")
    return [(f"key {number}", entry) for number, entry in enumerate(given or [], start=1)]


def _entry(value: Any, where: str) -> ApiKey:
    if not isinstance(value, dict):
        raise KeysError(f"{where}: must have name and hash")
    if not value.keys() <= ApiKey.model_fields.keys():
        raise KeysError(f"{where}: an unknown field; known are {', '.join(ApiKey.model_fields)}")
    try:
        return ApiKey.model_validate({k: v for k, v in value.items() if v is not None})
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False, include_context=False)[0]
    field = str(first["loc"][0])
    message = HASH_WANTED if field == "hash" else first["msg"].removeprefix("Value error, ")
    raise KeysError(f"{where}: {field}: {message}")
