"""What `expertmesh doctor` asks, in what order, and how it shows the answers."""

import json
import logging
from collections.abc import Iterable, Iterator
from pathlib import Path

import msgspec
import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Column, Table

from expertmesh.deploy.doctor.exchange_test import RoundTrip, check_exchange
from expertmesh.deploy.doctor.findings import Finding
from expertmesh.deploy.doctor.machine import check_machine
from expertmesh.deploy.doctor.model import check_model
from expertmesh.deploy.doctor.network import check_network
from expertmesh.deploy.doctor.ray_probe import check_ray
from expertmesh.deploy.doctor.software import (
    check_devices,
    check_kernels,
    check_operators,
    check_software,
)
from expertmesh.deploy.exit_codes import ExitCode
from expertmesh.kernels.registry import OperatorSupport

_COLOURS = {"ok": "green", "warn": "yellow", "fail": "red"}


def run_doctor(model: Path | None, address: str | None, exchange: bool, as_json: bool) -> None:
    """Raises Exit: OK, or FAILED when anything has failed."""
    logging.getLogger("expertmesh").addHandler(logging.NullHandler())
    operators, verdict = check_operators()
    findings = [*_asked(model, address), verdict]
    trips: list[RoundTrip] = []
    if exchange:
        trips, told = check_exchange()
        findings += told
    failed = any(one.status == "fail" for one in findings)
    if as_json:
        report = {
            "ok": not failed,
            "findings": findings,
            "operators": _by_operator(operators),
            "chosen": {one.name: one.backend for one in operators if one.chosen},
            "exchange": trips,
        }
        print(json.dumps(msgspec.to_builtins(report)))
    else:
        _print(findings, operators)
    raise typer.Exit(ExitCode.FAILED if failed else ExitCode.OK)


def _asked(model: Path | None, address: str | None) -> Iterator[Finding]:
    yield from check_software()
    devices = list(check_devices())
    yield from devices
    yield from check_kernels()
    yield from check_machine(sum(one.name.startswith("GPU ") for one in devices))
    yield from check_network()
    if model is not None:
        yield from check_model(model)
    if address is not None:
        yield from check_ray(address)


def _by_operator(operators: Iterable[OperatorSupport]) -> dict[str, dict[str, str]]:
    """operator -> backend -> "available" or the reason why not."""
    table: dict[str, dict[str, str]] = {}
    for one in operators:
        table.setdefault(one.name, {})[one.backend] = one.reason or "available"
    return table


def _print(findings: list[Finding], operators: list[OperatorSupport]) -> None:
    console = Console(highlight=False)
    sections = list(dict.fromkeys(one.section for one in findings))
    table = Table("", "", Column("found", overflow="fold"), Column("what to do", overflow="fold"))
    for section in sections:
        table.add_section()
        table.add_row("", f"[bold]{section}[/]")
        for one in findings:
            if one.section == section:
                status = f"[{_COLOURS[one.status]}]{one.status}[/]"
                table.add_row(status, one.name, escape(one.value), escape(one.advice))
    console.print(table)
    _print_operators(console, operators)
    failed = sum(one.status == "fail" for one in findings)
    warned = sum(one.status == "warn" for one in findings)
    colour = "red" if failed else "green"
    console.print(f"[{colour}]{failed} failed[/], {warned} to look at")


def _print_operators(console: Console, operators: list[OperatorSupport]) -> None:
    """Reasons that several operators share stand below the table, once."""
    chosen = {one.name: one.backend for one in operators if one.chosen}
    by_operator = _by_operator(operators)
    backends = list(next(iter(by_operator.values())))
    table = Table("operator", "auto takes", *backends, title="who can serve each operator here")
    notes: dict[str, int] = {}
    for name, served in by_operator.items():
        cells = [
            "[green]yes[/]"
            if served[one] == "available"
            else f"no ({notes.setdefault(served[one], len(notes) + 1)})"
            for one in backends
        ]
        table.add_row(name, chosen.get(name, "[red]none[/]"), *cells)
    console.print(table)
    for reason, number in notes.items():
        console.print(f"({number}) {escape(reason)}")
    console.print("`expertmesh serve --kernels auto,OPERATOR=BACKEND` chooses otherwise")
