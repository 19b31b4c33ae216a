"""What the `expertmesh keys` commands do."""

import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from getpass import getpass
from pathlib import Path

from expertmesh.deploy.auth.keys import (
    ApiKey,
    KeysError,
    check_key,
    file_line,
    hash_key,
    parse_keys,
)
from expertmesh.deploy.exit_codes import ExitCode, Refused


def ask_key() -> str:
    """From the terminal, unseen, or the first line of what is piped in. Raises Refused."""
    given = getpass("API key: ") if sys.stdin.isatty() else sys.stdin.readline()
    try:
        return check_key(given, "the key")
    except KeysError as error:
        raise Refused(ExitCode.USAGE, str(error)) from None


def line_for(name: str, key: str) -> str:
    """The entry of a keys file. Raises Refused for a name that can not be one."""
    try:
        return file_line(name, hash_key(key))
    except KeysError as error:
        raise Refused(ExitCode.USAGE, str(error)) from None


def read(path: Path) -> tuple[ApiKey, ...]:
    """Raises Refused naming file, place and field."""
    try:
        return parse_keys(path.read_bytes())
    except OSError as error:
        raise Refused(ExitCode.USAGE, f"{path}: {error.strerror}") from None
    except KeysError as error:
        raise Refused(ExitCode.USAGE, f"{path}: {error}") from None


def append(path: Path, line: str) -> None:
    """Adds an entry to a keys file of either form, or makes it. Raises Refused, and leaves the
    file alone, when the result would not be one."""
    try:
        before = path.read_text("utf-8") if path.exists() else ""
    except (OSError, UnicodeDecodeError):
        raise Refused(ExitCode.USAGE, f"{path}: can not be read as text") from None
    if before and not before.endswith("\n"):
        before += "\n"
    problem = ""
    # One line of JSON; in YAML an item of a list, as deep as the list is.
    for entry in (line, f"- {line}", f"  - {line}"):
        try:
            parse_keys(f"{before}{entry}\n".encode())
        except KeysError as error:
            problem = problem or str(error)
            continue
        _replace(path, f"{before}{entry}\n")
        return
    raise Refused(ExitCode.USAGE, f"{path}: can not take a further key: {problem}")


def _replace(path: Path, text: str) -> None:
    """At once, so that a server never reads half of it. Raises Refused."""
    target = path.resolve()  # a link stays one
    fresh = target.with_name(f".{target.name}.new")
    try:
        fresh.touch(0o600)
        fresh.write_text(text, "utf-8")
        if target.exists():
            fresh.chmod(target.stat().st_mode & 0o777)
        fresh.replace(target)
    except OSError as error:
        raise Refused(ExitCode.USAGE, f"{path}: {error.strerror}") from None


def whose(entries: Sequence[ApiKey], key: str) -> str:
    """The name that `key` has, and whether it would be accepted now. Raises Refused."""
    hashed = hash_key(key)
    for entry in entries:
        if entry.hash == hashed:
            usable = entry.usable(datetime.now(UTC))
            return entry.name if usable else f"{entry.name} (expired or disabled)"
    raise Refused(ExitCode.FAILED, "no key of the file is this one")
