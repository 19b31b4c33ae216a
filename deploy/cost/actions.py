"""What the commands of `expertmesh cost` do, and how they show it."""

from collections.abc import Sequence
from datetime import UTC, datetime
from decimal import Decimal, InvalidOperation
from pathlib import Path
from typing import Any

import msgspec
import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from expertmesh.deploy.cost import load, server
from expertmesh.deploy.cost.bill import read_bill
from expertmesh.deploy.cost.ledger import Ledger, default_folder
from expertmesh.deploy.cost.records import LoadTest, PlatformCharge, Record, Session
from expertmesh.deploy.cost.summary import Line, summarize
from expertmesh.deploy.exit_codes import ExitCode, Refused
from expertmesh.deploy.preflight import size_text

NOTE = (
    "Ledgers and currencies are not added up with one another: the same hour may be in several. "
    "Each cost per million tokens is the whole cost over the tokens of that kind."
)


class Price(msgspec.Struct, frozen=True):
    """Of the hardware, as the user gives it."""

    gpus: Decimal
    per_gpu_hour: Decimal | None
    currency: str | None


def price_of(gpus: str, per_gpu_hour: str | None, currency: str | None) -> Price:
    """Raises Refused for what is no amount, or half a price."""
    if (per_gpu_hour is None) != (currency is None):
        raise Refused(ExitCode.USAGE, "--price-per-gpu-hour and --currency are given together")
    if currency is not None and not (
        len(currency) == 3 and currency.isascii() and currency.isupper()
    ):
        raise Refused(ExitCode.USAGE, f"--currency {currency!r}: three capitals, such as EUR")
    price = None if per_gpu_hour is None else _amount("--price-per-gpu-hour", per_gpu_hour)
    return Price(_amount("--gpus", gpus), price, currency)


def _amount(option: str, text: str) -> Decimal:
    try:
        value = Decimal(text)
    except InvalidOperation:
        value = Decimal("NaN")
    if not value.is_finite() or value < 0 or len(value.as_tuple().digits) > 20:
        raise Refused(ExitCode.USAGE, f"{option} {text!r} is no amount")
    return value


def run_load(plan: load.Plan, price: Price, folder: Path | None, as_json: bool) -> None:
    """Raises Refused, or Exit with FAILED when a request did not complete."""
    model = plan.model or server.served_model(plan.url)
    plan = load.Plan(
        plan.url, model, plan.requests, plan.concurrency, plan.max_tokens, plan.prompts,
        plan.timeout_s,
    )  # fmt: skip
    outcome = load.run(plan)
    tokens = [one.tokens for one in outcome.complete if one.tokens is not None]
    first = outcome.first_token()
    record = LoadTest(
        at=datetime.now(UTC),
        seconds=outcome.seconds,
        gpus=price.gpus,
        price_per_gpu_hour=price.per_gpu_hour,
        currency=price.currency,
        prompt_tokens=sum(prompt for prompt, _ in tokens),
        generated_tokens=sum(generated for _, generated in tokens),
        requests=plan.requests,
        completed=len(outcome.complete),
        failures=outcome.failures,
        no_usage=len(outcome.complete) - len(tokens),
        memory_bytes=outcome.peak_memory and outcome.peak_memory[0],
        memory_of=outcome.peak_memory and outcome.peak_memory[1],
        url=plan.url,
        model=model,
        concurrency=plan.concurrency,
        max_tokens=plan.max_tokens,
        first_token_median_s=first and first[0],
        first_token_p99_s=first and first[1],
    )
    _record(record, folder, as_json)
    if record.failures and not as_json:
        told = ", ".join(f"{why} {count}" for why, count in sorted(record.failures.items()))
        typer.echo(f"not complete: {told}", err=True)
    raise typer.Exit(ExitCode.FAILED if record.failures else ExitCode.OK)


def run_session(url: str, price: Price, folder: Path | None, as_json: bool) -> None:
    """Raises Refused."""
    found = server.counters(url)
    now = datetime.now(UTC)
    seconds = now.timestamp() - found.started
    if seconds <= 0:
        raise Refused(ExitCode.UNREACHABLE, f"{url} says that it starts in the future: its clock?")
    used = server.memory(url)
    start = datetime.fromtimestamp(found.started, UTC).isoformat(timespec="milliseconds")
    record = Session(
        at=now,
        session=f"{url} since {start}",
        seconds=seconds,
        gpus=price.gpus,
        price_per_gpu_hour=price.per_gpu_hour,
        currency=price.currency,
        prompt_tokens=found.prompt_tokens,
        generated_tokens=found.generated_tokens,
        requests=found.completed + found.failed,
        completed=found.completed,
        memory_bytes=used and used[0],
        memory_of=used and used[1],
    )
    _record(record, folder, as_json)


def run_import(path: Path, columns: Sequence[str], folder: Path | None, as_json: bool) -> None:
    """Raises Refused. Lines that are in the ledger already are not taken again."""
    renamed = dict(_pair(column) for column in columns)
    charges = read_bill(path, renamed)
    ledger = Ledger(folder or default_folder())
    known = {one.identity for one in ledger.read(PlatformCharge).records}
    new = [one for one in charges if one.identity not in known]
    ledger.append(new)
    counts = {"imported": len(new), "already_there": len(charges) - len(new)}
    if as_json:
        print(msgspec.json.encode(counts).decode())
    else:
        print(f"{path}: {len(new)} lines taken, {len(charges) - len(new)} were there already")


def _pair(column: str) -> tuple[str, str]:
    ours, equals, theirs = column.partition("=")
    if not (ours and equals and theirs):
        raise Refused(ExitCode.USAGE, f"--column {column!r}: expected OURS=THEIRS")
    return ours, theirs


def run_report(folder: Path | None, as_json: bool) -> None:
    """Raises Refused, or Exit with DAMAGED_LEDGER when a line had to be left out."""
    ledger = Ledger(folder or default_folder())
    records: list[Record] = []
    problems: list[str] = []
    for page in (ledger.read(LoadTest), ledger.read(PlatformCharge), ledger.read(Session)):
        records += page.records
        problems += page.problems
    lines = summarize(records)
    if as_json:
        report = {"ledgers": lines, "problems": problems, "note": NOTE}
        print(msgspec.json.encode(report).decode())
    elif not lines and not problems:
        print(f"nothing is recorded in {ledger.folder}")
    else:
        _print(lines)
    for problem in problems:
        typer.secho(f"left out: {problem}", fg="red", err=True)
    raise typer.Exit(ExitCode.DAMAGED_LEDGER if problems else ExitCode.OK)


def _record(record: LoadTest | Session, folder: Path | None, as_json: bool) -> None:
    """Into its ledger, and shown."""
    ledger = Ledger(folder or default_folder())
    ledger.append([record])
    if as_json:
        shown: dict[str, Any] = msgspec.json.decode(record.model_dump_json())
        shown["summary"] = summarize([record])[0]
        print(msgspec.json.encode(shown).decode())
    else:
        _print(summarize([record]))


def _print(lines: Sequence[Line]) -> None:
    console = Console(highlight=False)
    for ledger in dict.fromkeys(one.ledger for one in lines):
        table = Table("", title=ledger)
        shown = [one for one in lines if one.ledger == ledger]
        for one in shown:
            table.add_column(one.currency or "no price", justify="right")
        for name, cells in zip(*_rows(shown), strict=True):
            table.add_row(name, *map(escape, cells))
        console.print(table)
    console.print(NOTE)


def _rows(lines: Sequence[Line]) -> tuple[list[str], list[list[str]]]:
    """(row names, per row a cell for each line)."""
    columns = [
        {
            "records": str(one.records),
            "cost": _money(one.cost),
            "prompt tokens": f"{one.prompt_tokens:,}",
            "generated tokens": f"{one.generated_tokens:,}",
            "cost per million prompt tokens": _money(one.per_million_prompt),
            "cost per million generated tokens": _money(one.per_million_generated),
            "completion rate": _share(one),
            "generated tokens per second": _number(one.tokens_per_second),
            "peak memory": "-"
            if one.peak_memory_bytes is None
            else size_text(one.peak_memory_bytes),
        }
        for one in lines
    ]
    names = list(columns[0])
    return names, [[column[name] for column in columns] for name in names]


def _money(value: Decimal | None) -> str:
    return "-" if value is None else f"{value:,.4f}"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:,.1f}"


def _share(one: Line) -> str:
    if one.completion_rate is None:
        return "-"
    return f"{one.completion_rate:.2%} ({one.completed:,} of {one.requests:,})"
