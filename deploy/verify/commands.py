"""`expertmesh verify`. Only typer is imported here, for `--help`."""

from pathlib import Path
from typing import Annotated, Optional

import typer

from expertmesh.deploy.command import run_command


def verify(
    model: Annotated[Path, typer.Argument(help="Checkpoint folder.")],
    manifest: Annotated[
        Optional[Path],  # noqa: UP045 (typer reads it)
        typer.Option(
            help="Compare with this list of files: one of --write-manifest, of sha256sum or b3sum, "
            "or the hub's JSON of a model or tree."
        ),
    ] = None,
    write_manifest: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option(help="Write sizes and digests of all files here."),
    ] = None,
    algorithm: Annotated[
        str, typer.Option(help="Of --write-manifest: sha256, blake3, or xxh3 (accidents only).")
    ] = "sha256",
    quick: Annotated[
        bool, typer.Option("--quick", help="Headers, small files and sizes only: no weights.")
    ] = False,
    threads: Annotated[
        int,
        typer.Option(min=1, max=64, help="Files read at the same time. Each takes some 20 MB."),
    ] = 4,
    as_json: Annotated[bool, typer.Option("--json", help="Print everything as JSON.")] = False,
) -> None:
    """Check a checkpoint: files, tensors, values, tokenizer; and against a manifest.

    Reads every byte once and writes nothing into the folder. Exit codes: 0 clean (there may be
    warnings), 2 wrong usage, 3 no such model, 4 broken checkpoint, 9 sound, but not what the
    manifest lists.
    """
    from expertmesh.deploy.verify.report import VerifyOptions, run_verify

    options = VerifyOptions(
        model=model.absolute(),
        manifest=manifest,
        write_manifest=write_manifest,
        algorithm=algorithm,
        quick=quick,
        as_json=as_json,
        threads=threads,
    )
    run_command(run_verify, options)
