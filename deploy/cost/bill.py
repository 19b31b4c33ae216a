"""Lines of a cloud bill, from a file that the user exports: CSV with a header, or a JSON list.

Needed columns: start, end (ISO 8601), resource, cost, currency (three capitals).
Optional: quantity, unit, invoice, prompt_tokens, generated_tokens, requests, completed.
Others are left out; a column of another name is taken by --column cost=ITS_NAME.
"""

import csv
import io
import json
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from expertmesh.deploy.cost.records import PlatformCharge
from expertmesh.deploy.exit_codes import ExitCode, Refused

COLUMNS = tuple(PlatformCharge.model_fields.keys() - {"version", "kind", "at"})


def read_bill(path: Path, renamed: Mapping[str, str]) -> list[PlatformCharge]:
    """Every line, or none: Refused names the first bad line and column. renamed: ours -> theirs."""
    for ours in renamed:
        if ours not in COLUMNS:
            known = ", ".join(sorted(COLUMNS))
            raise Refused(ExitCode.USAGE, f"--column {ours}=...: not one of {known}")
    try:
        text = path.read_text(encoding="utf-8-sig")
        rows = _json_rows(text) if text.lstrip()[:1] in ("[", "{") else _csv_rows(text)
    except (OSError, ValueError, csv.Error, RecursionError) as error:
        raise Refused(ExitCode.USAGE, f"{path}: {str(error)[:300]}") from error
    if not rows:
        raise Refused(ExitCode.USAGE, f"{path}: no line of a bill in it")
    now = datetime.now(UTC)
    return [_charge(path, where, row, renamed, now) for where, row in rows]


def _csv_rows(text: str) -> list[tuple[str, dict[str, Any]]]:
    reader = csv.DictReader(io.StringIO(text, newline=""), strict=True)
    rows: list[tuple[str, dict[str, Any]]] = []
    for row in reader:
        if None in row:
            raise ValueError(f"line {reader.line_num}: more fields than the header names")
        # An empty cell says nothing, and what a short line leaves out is None.
        rows.append((f"line {reader.line_num}", {key: one for key, one in row.items() if one}))
    return rows


def _json_rows(text: str) -> list[tuple[str, dict[str, Any]]]:
    # Numbers as they are written: a float would change the cents.
    parsed = json.loads(text, parse_float=str)
    if not isinstance(parsed, list) or not all(isinstance(row, dict) for row in parsed):
        raise ValueError("expected a JSON list of objects")
    return [(f"entry {at}", row) for at, row in enumerate(parsed)]


def _charge(
    path: Path, where: str, row: Mapping[str, Any], renamed: Mapping[str, str], now: datetime
) -> PlatformCharge:
    found = {
        ours: row[renamed.get(ours, ours)] for ours in COLUMNS if renamed.get(ours, ours) in row
    }
    try:
        return PlatformCharge.model_validate({"at": now, **found})
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        ours = str(first["loc"][0]) if first["loc"] else ""
        column = renamed.get(ours, ours)
        told = f"column {column}: {first['msg']}" if column else first["msg"]
        raise Refused(ExitCode.USAGE, f"{path}: {where}: {told}") from None
