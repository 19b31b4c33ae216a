"""What `expertmesh verify` has to say, piece by piece, and what follows from it."""

import threading
from collections import Counter
from collections.abc import Iterable
from typing import Literal

import msgspec

from expertmesh.actors.model.problems import Problem
from expertmesh.deploy.exit_codes import ExitCode

Severity = Literal["error", "warning"]
Check = Literal["config", "files", "tensors", "values", "tokenizer", "manifest"]

# A wrong config gives one finding per tensor: half a million in K3.
KEPT_PER_CHECK = 1000


class Finding(msgspec.Struct, frozen=True):
    """One thing. Empty fields do not apply. tensor: the full name in the file."""

    severity: Severity
    check: Check
    text: str
    file: str = ""
    tensor: str = ""
    expected: str = ""
    found: str = ""


class Findings:
    """Collects from any thread. Beyond a thousand of a kind they are counted, not kept."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._kept: list[Finding] = []
        self._counts: Counter[tuple[Check, Severity]] = Counter()

    def add(self, finding: Finding) -> None:
        kind = finding.check, finding.severity
        with self._lock:
            self._counts[kind] += 1
            if self._counts[kind] <= KEPT_PER_CHECK:
                self._kept.append(finding)

    def take(self, check: Check, problems: Iterable[Problem], severity: Severity = "error") -> None:
        """Adds what the loader's own checks have found."""
        for one in problems:
            self.add(
                Finding(severity, check, one.text, one.file, one.tensor, one.expected, one.found)
            )

    def count(self, severity: Severity, check: Check | None = None) -> int:
        return sum(
            count
            for (of, kind), count in self._counts.items()
            if kind == severity and check in (None, of)
        )

    @property
    def kept(self) -> list[Finding]:
        """Errors first, then by check and in the order of the files and names."""
        order = {"error": 0, "warning": 1}
        return sorted(self._kept, key=lambda one: (order[one.severity], one.check, one.file))

    @property
    def left_out(self) -> int:
        return sum(self._counts.values()) - len(self._kept)

    @property
    def outcome(self) -> ExitCode:
        """BAD_CHECKPOINT when the model can not be trusted to serve, DIFFERS when it can, but is
        not what the manifest describes; warnings alone are OK."""
        differing = self.count("error", "manifest")
        if self.count("error") > differing:
            return ExitCode.BAD_CHECKPOINT
        return ExitCode.DIFFERS if differing else ExitCode.OK
