"""`expertmesh cluster`: before `ray up`, and after. Only typer is imported here, for `--help`."""

from pathlib import Path
from typing import Annotated, Optional

import typer

from expertmesh.deploy.command import run_command

cluster = typer.Typer(name="cluster", help="Check a Ray cluster file; wait for its hosts.",
                      no_args_is_help=True)  # fmt: skip


@cluster.command()
def check(
    file: Annotated[Path, typer.Argument(help="A cluster file of `ray up`.")],
    reach: Annotated[
        bool,
        typer.Option("--reach", help="Also connect to the ssh port of every host it names."),
    ] = False,
) -> None:
    """Find what `ray up` would only find later, or never tell: by key.

    Missing, unknown, outdated and contradictory keys, numbers of workers that cannot be, start
    commands whose workers never join, other versions of Ray or Python than this installation's.

    Exit codes: 0 nothing wrong (there may be warnings), 2 something is, or no such file.
    """
    from expertmesh.deploy.hosts.check import check_file

    run_command(check_file, file, reach)


@cluster.command()
def wait(
    nodes: Annotated[int, typer.Option(min=1, help="How many there must be, with the head.")],
    timeout: Annotated[float, typer.Option(min=0, help="Seconds.")] = 300.0,
    address: Annotated[
        str, typer.Option(help='"auto" on a host of the cluster, or the head\'s HOST:PORT.')
    ] = "auto",
    model: Annotated[
        Optional[Path],  # noqa: UP045 (typer reads it)
        typer.Option(help="A checkpoint folder that every node must see at this path."),
    ] = None,
) -> None:
    """Wait until all nodes of a cluster have joined; then look at each of them.

    Warns of versions that differ, of a small /dev/shm, and of nodes that know themselves only by a
    loopback address.

    Exit codes: 0 all have joined, 3 a node does not see the model, 7 some have not joined in time,
    8 no cluster answers.
    """
    from expertmesh.deploy.hosts.wait import wait_for_nodes

    run_command(wait_for_nodes, nodes, timeout, address, model)
