"""Lists of files with sizes and digests: read in the forms they are published in, and written.

Read: this command's own JSON; `sha256sum` and `b3sum` lines (`HEX  NAME`, or tagged
`SHA256 (NAME) = HEX`); the hub's JSON of a model (`/api/models/ID?blobs=true`) or of its tree
(`/api/models/ID/tree/main?recursive=true`), where large files have a sha256 and small ones git's
own id.
"""

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import blake3
import msgspec
import xxhash

from expertmesh.deploy.exit_codes import ExitCode, Refused
from expertmesh.deploy.verify.contents import Hasher

FORMAT = "expertmesh-manifest-1"
ALGORITHMS = ("sha256", "blake3", "xxh3")
_DIGITS = {"sha256": 64, "blake3": 64, "xxh3": 16, "git": 40}
_TAGGED = re.compile(r"(SHA256|BLAKE3|XXH3) \((.+)\) = ([0-9A-Fa-f]+)")
_LINE = re.compile(r"([0-9A-Fa-f]+) [ *](.+)")


@dataclass(frozen=True, slots=True)
class Digest:
    """algorithm: sha256, blake3, xxh3 (64 bit), or git (sha1 of a blob)."""

    algorithm: str
    value: str


@dataclass(frozen=True, slots=True)
class Listed:
    """What a manifest says of one file; None where it says nothing."""

    size: int | None = None
    digest: Digest | None = None


class _OwnFile(msgspec.Struct, forbid_unknown_fields=True):
    size: int
    digest: str


class _Own(msgspec.Struct, forbid_unknown_fields=True):
    format: str
    algorithm: str
    files: dict[str, _OwnFile]


def new_hasher(algorithm: str, size: int) -> Hasher:
    """size: of the file, which git hashes first."""
    if algorithm == "blake3":
        made: Hasher = blake3.blake3()
        return made
    if algorithm == "xxh3":
        return xxhash.xxh3_64()
    if algorithm == "git":
        return hashlib.sha1(b"blob %d\0" % size, usedforsecurity=False)
    return hashlib.sha256()


def read_manifest(path: Path) -> dict[str, Listed]:
    """File name -> what is listed. Raises Refused naming the line or key."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise Refused(ExitCode.USAGE, f"--manifest {path}: {error}") from error
    try:
        listed = _from_json(text) if text.lstrip()[:1] in ("{", "[") else _from_lines(text, path)
        for name in listed:
            _refuse_escape(name)
    except (ValueError, RecursionError) as error:
        raise Refused(ExitCode.USAGE, f"--manifest {path}: {str(error)[:300]}") from error
    if not listed:
        raise Refused(ExitCode.USAGE, f"--manifest {path}: lists no file")
    return listed


def write_manifest(path: Path, algorithm: str, files: Mapping[str, tuple[int, str]]) -> None:
    """files: name -> (size, hex digest). Raises Refused."""
    own = _Own(FORMAT, algorithm, {name: _OwnFile(*facts) for name, facts in sorted(files.items())})
    try:
        path.write_bytes(msgspec.json.format(msgspec.json.encode(own), indent=1) + b"\n")
    except OSError as error:
        raise Refused(ExitCode.USAGE, f"--write-manifest {path}: {error}") from error


def _from_lines(text: str, path: Path) -> dict[str, Listed]:
    # The lines of sha256sum and b3sum look the same.
    plain = "blake3" if path.suffix in (".b3", ".blake3") else "sha256"
    listed: dict[str, Listed] = {}
    for number, line in enumerate(text.splitlines(), start=1):
        if not line.strip() or line.startswith("#"):
            continue
        if tagged := _TAGGED.fullmatch(line.strip()):
            kind, name, digest = tagged[1].lower(), tagged[2], tagged[3]
        elif match := _LINE.fullmatch(line.rstrip()):
            kind, name, digest = plain, match[2], match[1]
        else:
            raise ValueError(f"line {number}: expected `HEX  NAME` or `SHA256 (NAME) = HEX`")
        name = name.removeprefix("./")
        if name in listed:
            raise ValueError(f"line {number}: {name} is listed twice")
        listed[name] = Listed(digest=_digest(kind, digest, f"line {number}"))
    return listed


def _from_json(text: str) -> dict[str, Listed]:
    raw: Any = json.loads(text)
    if isinstance(raw, dict) and "format" in raw:
        own = msgspec.convert(raw, _Own)
        if own.format != FORMAT:
            raise ValueError(f"format: {own.format!r} is not {FORMAT!r}")
        if own.algorithm not in ALGORITHMS:
            raise ValueError(f"algorithm: {own.algorithm!r} is not one of {', '.join(ALGORITHMS)}")
        return {
            name: Listed(one.size, _digest(own.algorithm, one.digest, f"files.{name}"))
            for name, one in own.files.items()
        }
    entries = raw.get("siblings") if isinstance(raw, dict) else raw
    if not isinstance(entries, list):
        raise ValueError("neither this command's format, nor a hub's model or tree")
    listed: dict[str, Listed] = {}
    for at, entry in enumerate(entries):
        if not isinstance(entry, dict) or entry.get("type") == "directory":
            continue
        name = entry.get("rfilename", entry.get("path"))
        if not isinstance(name, str) or name in listed:
            raise ValueError(f"entry {at}: needs one rfilename or path of its own")
        listed[name] = _hub_entry(entry, f"entry {at} ({name})")
    return listed


def _hub_entry(entry: Mapping[str, Any], where: str) -> Listed:
    large = entry.get("lfs")
    size = entry.get("size")
    digest = None
    if isinstance(large, dict):
        size = large.get("size", size)
        digest = _digest("sha256", large.get("sha256", large.get("oid")), where)
    elif git := entry.get("blobId", entry.get("oid")):
        digest = _digest("git", git, where)
    if size is not None and (isinstance(size, bool) or not isinstance(size, int) or size < 0):
        raise ValueError(f"{where}: size {size!r} is no number of bytes")
    return Listed(size, digest)


def _digest(algorithm: str, value: object, where: str) -> Digest:
    digits = _DIGITS[algorithm]
    if not isinstance(value, str) or not re.fullmatch(rf"[0-9A-Fa-f]{{{digits}}}", value):
        raise ValueError(f"{where}: a {algorithm} digest has {digits} hex digits, not {value!r}")
    return Digest(algorithm, value.lower())


def _refuse_escape(name: str) -> None:
    path = PurePosixPath(name)
    if not name or path.is_absolute() or ".." in path.parts or "\\" in name or "\0" in name:
        raise ValueError(f"{name!r} leads out of the folder")
