"""Three files of JSON lines, one per kind of record, that only ever grow.

A line that cannot be read is told by file and number and left out; it never stops the others.
"""

import fcntl
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Generic, TypeVar

from pydantic import ValidationError

from expertmesh.deploy.cost.records import LoadTest, PlatformCharge, Record, Session
from expertmesh.deploy.exit_codes import ExitCode, Refused

FILES: dict[type[Record], str] = {
    LoadTest: "load-tests.jsonl",
    PlatformCharge: "platform.jsonl",
    Session: "sessions.jsonl",
}
Kind = TypeVar("Kind", LoadTest, PlatformCharge, Session)


@dataclass(slots=True)
class Page(Generic[Kind]):
    """What a file holds. problems: "FILE:LINE: why", one for each line that is left out."""

    records: list[Kind] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)


def default_folder() -> Path:
    """Where programs keep what they record (XDG)."""
    state = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    return Path(state) / "expertmesh" / "cost"


class Ledger:
    """The folder of the three files. Several processes may write at the same time."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def append(self, records: Sequence[Record]) -> None:
        """All or none of `records`, which are of one kind. Raises Refused."""
        if not records:
            return
        path = self.folder / FILES[type(records[0])]
        lines = "".join(record.model_dump_json() + "\n" for record in records).encode()
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            with path.open("a+b") as file:
                fcntl.flock(file, fcntl.LOCK_EX)
                if _ends_inside_a_line(path):
                    lines = b"\n" + lines  # a writer died there: its line is lost, not this one
                file.write(lines)
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            raise Refused(
                ExitCode.USAGE, f"the ledger {path} cannot be written: {error}"
            ) from error

    def read(self, kind: type[Kind]) -> Page[Kind]:
        """Raises Refused when the file is there and cannot be read."""
        path, page = self.folder / FILES[kind], Page[Kind]()
        if not path.exists():
            return page
        try:
            lines = path.read_bytes().split(b"\n")
        except OSError as error:
            raise Refused(ExitCode.USAGE, f"the ledger {path} cannot be read: {error}") from error
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            try:
                page.records.append(kind.model_validate_json(line))
            except ValidationError as error:
                page.problems.append(f"{path}:{number}: {_why(error)}")
        return page


def _ends_inside_a_line(path: Path) -> bool:
    with path.open("rb") as file:
        if file.seek(0, os.SEEK_END) == 0:
            return False
        file.seek(-1, os.SEEK_END)
        return file.read(1) != b"\n"


def _why(error: ValidationError) -> str:
    first = error.errors(include_url=False, include_input=False)[0]
    place = ".".join(map(str, first["loc"]))
    if place == "version":
        return "written by another version of the ledger"
    more = error.error_count() - 1
    text = f"{place}: {first['msg']}" if place else first["msg"]
    return text + (f" (and {more} more)" if more else "")
