"""`expertmesh doctor`. Only typer is imported here, for `--help`."""

from pathlib import Path
from typing import Annotated, Optional

import typer

from expertmesh.deploy.command import run_command


def doctor(
    model: Annotated[
        Optional[Path],  # noqa: UP045 (typer reads it)
        typer.Option(help="Also check that this checkpoint would start here (headers, memory)."),
    ] = None,
    address: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(help='Also ask this Ray cluster: "auto" or HOST:PORT.'),
    ] = None,
    exchange: Annotated[
        bool,
        typer.Option(
            "--exchange/--no-exchange", help="Time the exchange of two processes over loopback."
        ),
    ] = True,
    as_json: Annotated[bool, typer.Option("--json", help="Print everything as JSON.")] = False,
) -> None:
    """Look at this machine: versions, devices, limits, ports, network, exchange, operators.

    Changes nothing. Exit codes: 0 nothing has failed (there may be warnings), 1 something has.
    """
    from expertmesh.deploy.doctor.report import run_doctor

    run_command(run_doctor, None if model is None else model.absolute(), address, exchange, as_json)
