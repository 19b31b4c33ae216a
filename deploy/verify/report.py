"""What `expertmesh verify` prints: for people, and for machines."""

import logging
import sys
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Column, Table

from expertmesh.deploy.exit_codes import ExitCode, Refused
from expertmesh.deploy.preflight import size_text
from expertmesh.deploy.verify.manifest import ALGORITHMS, read_manifest, write_manifest
from expertmesh.deploy.verify.verification import Verified, verify

SHOWN_PER_KIND = 10
_OUTCOMES = {
    ExitCode.OK: "clean",
    ExitCode.BAD_CHECKPOINT: "broken",
    ExitCode.DIFFERS: "differs from the manifest",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifyOptions:
    """The command's options; see `expertmesh verify --help`."""

    model: Path
    manifest: Path | None = None
    write_manifest: Path | None = None
    algorithm: str = "sha256"
    quick: bool = False
    as_json: bool = False
    threads: int = 1


def run_verify(options: VerifyOptions) -> None:
    """Raises Refused, or Exit with what the findings come to."""
    # Every finding is told below; the loader's own log lines would tell some twice.
    logging.getLogger("expertmesh").addHandler(logging.NullHandler())
    if options.quick and options.write_manifest is not None:
        raise Refused(ExitCode.USAGE, "--write-manifest reads every byte, --quick none")
    if options.algorithm not in ALGORITHMS:
        known = ", ".join(ALGORITHMS)
        raise Refused(ExitCode.USAGE, f"--algorithm {options.algorithm!r} is not one of {known}")
    listed = None if options.manifest is None else read_manifest(options.manifest)
    began = time.monotonic()
    own = (options.manifest, options.write_manifest)
    found = verify(
        options.model,
        quick=options.quick,
        listed=listed,
        hash_all=None if options.write_manifest is None else options.algorithm,
        apart=frozenset(path.resolve() for path in own if path is not None),
        threads=options.threads,
        progress=not options.as_json and sys.stderr.isatty(),
    )
    seconds = time.monotonic() - began
    outcome = found.findings.outcome
    if options.as_json:
        print(msgspec.json.encode(_as_json(options, found, seconds)).decode())
    else:
        _print(options, found, seconds)
    if options.write_manifest is not None:
        if outcome is ExitCode.BAD_CHECKPOINT:
            typer.echo(f"{options.write_manifest}: not written, the model is broken", err=True)
        else:
            write_manifest(options.write_manifest, options.algorithm, found.digests)
    raise typer.Exit(outcome)


def _as_json(options: VerifyOptions, found: Verified, seconds: float) -> dict[str, Any]:
    findings, summary = found.findings, found.summary
    sizes = summary and {
        "shards": summary.shards,
        "tensors": summary.tensors_by_dtype,
        "bytes": summary.text_bytes,
        "parameters": summary.attention.parameters + summary.experts.parameters,
    }
    return {
        "model": str(options.model),
        "outcome": _OUTCOMES[findings.outcome],
        "exit_code": int(findings.outcome),
        "quick": options.quick,
        "errors": findings.count("error"),
        "warnings": findings.count("warning"),
        "findings": findings.kept,
        "findings_left_out": findings.left_out,
        "summary": sizes,
        "bytes_read": found.bytes_read,
        "seconds": round(seconds, 3),
    }


def _print(options: VerifyOptions, found: Verified, seconds: float) -> None:
    console, findings = Console(highlight=False), found.findings
    if findings.kept:
        console.print(_table(found))
    if (summary := found.summary) is not None:
        parameters = summary.attention.parameters + summary.experts.parameters
        kinds = ", ".join(f"{count} {kind}" for kind, count in summary.tensors_by_dtype.items())
        console.print(
            f"{_counted(summary.shards, 'shard')}, {size_text(summary.text_bytes)}, "
            f"{parameters / 1e6:,.1f} M parameters; tensors: {kinds}"
        )
    read = "headers only" if options.quick else f"{size_text(found.bytes_read)} read"
    colour = "green" if findings.outcome is ExitCode.OK else "red"
    errors = _counted(findings.count("error"), "error")
    warnings = _counted(findings.count("warning"), "warning")
    console.print(
        f"[{colour}]{_OUTCOMES[findings.outcome]}[/]: {errors}, {warnings}; {read} in "
        f"{seconds:.1f} s"
    )


def _counted(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"


def _table(found: Verified) -> Table:
    table = Table("", "check", Column("finding", overflow="fold"))
    shown: Counter[tuple[str, str]] = Counter()
    for one in found.findings.kept:
        kind = one.check, one.severity
        shown[kind] += 1
        if shown[kind] > SHOWN_PER_KIND:
            continue
        colour = "red" if one.severity == "error" else "yellow"
        table.add_row(f"[{colour}]{one.severity}[/]", one.check, escape(one.text))
    left = found.findings.left_out + sum(max(0, n - SHOWN_PER_KIND) for n in shown.values())
    if left:
        table.caption = f"and {left} more; --json has up to 1000 of a kind"
    return table
