"""`expertmesh keys`: make keys, check the file that a server reads. Only typer is imported here.

A key never stands on a command line, where every process of the machine could read it.
"""

from pathlib import Path
from typing import Annotated, Optional

import typer

from expertmesh.deploy.command import run_command

keys = typer.Typer(
    name="keys",
    help="API keys: a server's keys file has only their hashes.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)

NAME = typer.Argument(help="Whose key it is: letters, digits and ._@-")
FILE = typer.Option(help="Append the line to this file. A running server reads it by itself.")


@keys.command()
def new(
    name: Annotated[str, NAME],
    file: Annotated[Optional[Path], FILE] = None,  # noqa: UP045 (typer reads it)
) -> None:
    """Make a key. It is shown once; only its hash is kept.

    With --file the key alone is printed, else the key and the line for a keys file.
    """
    from expertmesh.deploy.auth.key_file import append, line_for
    from expertmesh.deploy.auth.keys import new_key

    key = new_key()
    line = run_command(line_for, name, key)
    if file is not None:
        run_command(append, file, line)
        typer.echo(key)
    else:
        typer.echo(f"key   {key}\nline  {line}")


@keys.command("hash")
def hash_(
    name: Annotated[str, NAME],
    file: Annotated[Optional[Path], FILE] = None,  # noqa: UP045
) -> None:
    """Print the line for a key that exists already. The key is asked for, or read from a pipe."""
    from expertmesh.deploy.auth.key_file import append, ask_key, line_for

    line = run_command(line_for, name, run_command(ask_key))
    if file is not None:
        run_command(append, file, line)
    else:
        typer.echo(line)


@keys.command()
def check(
    file: Annotated[Path, typer.Argument(help="A keys file.")],
    key: Annotated[
        bool, typer.Option("--key", help="Ask for a key, and tell whose of these it is.")
    ] = False,
) -> None:
    """Tell whose keys a file has and what they may do. Exit codes: 0 all is well, 1 no such key,
    2 the file can not be used."""
    from expertmesh.deploy.auth.key_file import ask_key, read, whose

    entries = run_command(read, file)
    if key:
        typer.echo(run_command(whose, entries, run_command(ask_key)))
        return
    for entry in entries:
        limits = ", ".join(f"{field} {value}" for field, value in entry.limits().items())
        typer.echo(f"{entry.name}  {limits}".rstrip())
