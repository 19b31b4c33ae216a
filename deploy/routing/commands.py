"""`expertmesh routing`: look at where tokens go. Only typer is imported here, for `--help`."""

from pathlib import Path
from typing import Annotated, Optional

import typer

from expertmesh.deploy.command import LOCAL_URL, URL, run_command

routing = typer.Typer(
    name="routing",
    help="Which experts tokens choose, and how evenly the expert actors are loaded.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)


@routing.command()
def report(
    recording: Annotated[
        Optional[Path],  # noqa: UP045 (typer reads it)
        typer.Argument(help="A file of `routing record`. Default: ask the running server."),
    ] = None,
    url: Annotated[str, URL] = LOCAL_URL,
    png: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option(help="Write heat maps to this file."),
    ] = None,
    json: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option(help='Write all numbers to this file; "-" prints them instead of a table.'),
    ] = None,
    all_layers: Annotated[
        bool, typer.Option("--all", help="Every layer and actor in the tables.")
    ] = False,
) -> None:
    """Imbalance, Gini, entropy, dead experts, fan-out and co-activation, layer by layer.

    Co-activated pairs need a recording: a running server does not keep them.
    """
    from expertmesh.deploy.routing.reporting import Outputs, run_report

    outputs = Outputs(png=png, json=json, all_layers=all_layers)
    run_command(run_report, recording, url, outputs)


@routing.command()
def record(
    output: Annotated[Path, typer.Argument(help="The .npz file to write.")],
    url: Annotated[str, URL] = LOCAL_URL,
    seconds: Annotated[
        float, typer.Option(min=0.1, max=600, help="Stop after so long at the latest.")
    ] = 60.0,
    tokens: Annotated[
        int, typer.Option(min=1, max=1_000_000, help="Stop after so many tokens at the latest.")
    ] = 10_000,
) -> None:
    """Record which experts whole tokens choose while the server works. The layout of the file is
    described in expertmesh/cluster/ledger/recording.py."""
    from expertmesh.deploy.routing.reporting import run_record

    run_command(run_record, output, url, seconds, tokens)
