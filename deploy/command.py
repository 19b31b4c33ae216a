"""What the commands share: the server they ask, and how a refusal ends them. Imports only typer."""

from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

import typer

Result = TypeVar("Result")

LOCAL_URL = "http://127.0.0.1:8000"
URL = typer.Option(help="A running server.", envvar="EXPERTMESH_URL")

# Each option of `serve` has its variable; naming every one would double the help.
option = partial(typer.Option, show_envvar=False)


def run_command(command: Callable[..., Result], *arguments: Any) -> Result:
    """Its result; what it refuses is told without a traceback and becomes the exit code."""
    from expertmesh.deploy.exit_codes import Refused

    try:
        return command(*arguments)
    except Refused as refusal:
        typer.secho(f"error: {refusal.message}", fg="red", err=True)
        if refusal.hint:
            typer.echo(f"hint: {refusal.hint}", err=True)
        raise typer.Exit(refusal.code) from None
