"""`expertmesh eval`. Only typer is imported here, for `--help`."""

from pathlib import Path
from typing import Annotated, Optional

import typer

from expertmesh.deploy.command import run_command

evaluation = typer.Typer(
    name="eval",
    help="Measure what a model still knows of a long text, by where its state is kept.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
BUNDLED = Path(__file__).resolve().parents[1] / "models" / "nano"


@evaluation.callback()
def root() -> None:
    """Measure what a model still knows of a long text, by where its state is kept."""


@evaluation.command()
def longcontext(
    model: Annotated[
        Optional[Path],  # noqa: UP045 (typer reads it)
        typer.Option(help="Checkpoint folder. Default: the bundled model."),
    ] = None,
    task: Annotated[
        Optional[list[str]],  # noqa: UP045
        typer.Option(help="One of those in deploy/eval/README.md; may be repeated. Default: all."),
    ] = None,
    length: Annotated[
        Optional[list[int]],  # noqa: UP045
        typer.Option(min=256, help="Tokens of the text; may be repeated. Default: 2048, 4096."),
    ] = None,
    mode: Annotated[
        Optional[list[str]],  # noqa: UP045
        typer.Option(
            help="exact, offload, select, or blind, which reads nothing of old tokens; may be "
            "repeated, the first is what the others are compared with. Default: exact, select, "
            "blind."
        ),
    ] = None,
    probes: Annotated[int, typer.Option(min=1, help="Questions per task, length and mode.")] = 100,
    seed: Annotated[int, typer.Option(help="Of all texts and questions.")] = 0,
    filler: Annotated[
        str, typer.Option(help="prose (from templates), noise (RULER's), or a file with text.")
    ] = "prose",
    window: Annotated[
        int, typer.Option(min=64, help="But in exact: last tokens that stay on the device.")
    ] = 256,
    sinks: Annotated[
        int, typer.Option(min=64, help="But in exact: first tokens that stay there.")
    ] = 64,
    pages: Annotated[
        Optional[list[int]],  # noqa: UP045
        typer.Option(
            min=1,
            help="select: most old pages that a step reads exactly, a layer; may be "
            "repeated, for a curve. Default: 4, 16.",
        ),
    ] = None,
    mass: Annotated[
        float, typer.Option(min=0.0, max=1.0, help="select: attention mass that they should hold.")
    ] = 0.98,
    codec: Annotated[
        str, typer.Option(help="raw, lossless, int8 or int4: how old pages are packed.")
    ] = "lossless",
    out: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option(help="Folder for longcontext.json and its plots."),
    ] = None,
    threads: Annotated[int, typer.Option(min=1, help="Of this process.")] = 1,
    as_json: Annotated[bool, typer.Option("--json", help="Print everything as JSON.")] = False,
) -> None:
    """Facts in noise, chains, tables, counting, and a chat's first turn: what is still known.

    Everything is generated from the seed. The text is a prompt; the question and its answer go
    through the decode path token by token, as greedy decoding would have it. A text is read once
    for all its questions and all modes. A checkpoint's own limit on positions is lifted for the
    time. Exit codes: 0 measured, 2 wrong usage, 3 no such model, 4 a broken one.
    """
    from expertmesh.deploy.eval.report import Wish, run_longcontext

    wish = Wish(
        model=(model or BUNDLED).absolute(), tasks=task or [], lengths=length or [2048, 4096],
        modes=mode or ["exact", "select", "blind"], probes=probes, seed=seed, filler=filler,
        window=window, sinks=sinks, pages=pages or [4, 16], mass=mass, codec=codec, out=out,
        threads=threads, as_json=as_json,
    )  # fmt: skip
    run_command(run_longcontext, wish)
