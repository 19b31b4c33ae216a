"""`expertmesh bench`. Only typer is imported here, for `--help`."""

from pathlib import Path
from typing import Annotated, Optional

import typer

from expertmesh.deploy.command import run_command

bench = typer.Typer(
    name="bench",
    help="Measure one part of the server on this machine.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
BUNDLED = Path(__file__).resolve().parents[1] / "models" / "nano"


@bench.callback()
def root() -> None:
    """Measure one part of the server on this machine."""


@bench.command()
def residual(
    model: Annotated[
        Optional[Path],  # noqa: UP045 (typer reads it)
        typer.Option(help="Checkpoint whose shape is taken beside K3's. Default: the bundled one."),
    ] = None,
    tokens: Annotated[
        Optional[list[int]],  # noqa: UP045
        typer.Option(min=1, max=1024, help="Rows of the step; may be repeated. Default: 1, 8, 32."),
    ] = None,
    rounds: Annotated[int, typer.Option(min=1, help="Each way once per round, in turn.")] = 15,
    threads: Annotated[int, typer.Option(min=1, help="An actor of a mesh has one or few.")] = 1,
    k3: Annotated[bool, typer.Option("--k3/--no-k3", help="K3's shape: 187 sites of 7168.")] = True,
    as_json: Annotated[bool, typer.Option("--json", help="Print everything as JSON.")] = False,
) -> None:
    """Attention Residuals of a decode step: mix and norm as one operator against two.

    Operators and bytes are counted from the code as it runs, times are taken in turn in one run,
    on the CPU; kernels launched and bytes moved by a GPU are counted without one, where Triton is
    installed. Exit codes: 0 measured and equal in float32, 1 the results differ, 2 wrong usage,
    3 no such model, 4 a broken one.
    """
    from expertmesh.deploy.bench.report import run_residual

    folder = (model or BUNDLED).absolute()
    run_command(run_residual, folder, tokens or [1, 8, 32], rounds, threads, k3, as_json)


@bench.command()
def kernels(
    operators: Annotated[
        Optional[list[str]],  # noqa: UP045
        typer.Argument(help="Operators that have a kernel. Default: all."),
    ] = None,
    aot: Annotated[
        bool, typer.Option("--aot", help="Compile for GPUs that need not be here, and judge.")
    ] = False,
    target: Annotated[
        Optional[list[str]],  # noqa: UP045
        typer.Option(help="With --aot: sm_90, sm_100, gfx942; may be repeated. Default: all."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print everything as JSON.")] = False,
) -> None:
    """Kernels at K3's shapes: the least an H200 needs, and what a GPU here takes.

    With --aot: registers, spills, shared and tensor memory, tensor-core instructions, from the
    machine code. Exit codes: 0 all is well, 1 an operator failed or a gate was missed, 2 wrong
    usage.
    """
    from expertmesh.deploy.bench.kernels_report import run_aot, run_floors

    if aot:
        run_command(run_aot, operators or [], target or [], as_json)
    elif target:
        raise typer.BadParameter("only with --aot", param_hint="--target")
    else:
        run_command(run_floors, operators or [], as_json)


@bench.command()
def tiers(
    model: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option(help="Checkpoint folder. Default: the bundled model."),
    ] = None,
    part: Annotated[
        Optional[list[str]],  # noqa: UP045
        typer.Option(help="memory, load, hits, recall or codecs; may be repeated. Default: all."),
    ] = None,
    length: Annotated[
        Optional[list[int]],  # noqa: UP045
        typer.Option(min=64, help="Tokens of a prompt; may be repeated. Default: 1024, 4096."),
    ] = None,
    trials: Annotated[int, typer.Option(min=1, help="hits: per length and tier.")] = 20,
    cold_trials: Annotated[
        Optional[int],  # noqa: UP045
        typer.Option(min=1, help="hits: how often a length is computed again. Default: as trials."),
    ] = None,
    task: Annotated[
        Optional[list[str]],  # noqa: UP045
        typer.Option(
            help="recall: of those in deploy/eval/README.md; may be repeated. Default: "
            "words, multikey, returning."
        ),
    ] = None,
    probes: Annotated[
        int, typer.Option(min=1, help="recall: questions per task, length and setting.")
    ] = 40,
    out: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option(help="Folder for tiers.json and its plots."),
    ] = None,
    threads: Annotated[int, typer.Option(min=1, help="Of this process.")] = 1,
    as_json: Annotated[bool, typer.Option("--json", help="Print everything as JSON.")] = False,
) -> None:
    """Where state is kept, and what that costs and saves, measured on a model's own engine.

    memory: bytes of a sequence against its length, accounted and as the system sees them. load:
    throughput and first tokens with state on the device, in host memory, on disk, or computed
    again. hits: first tokens by length and tier. recall: right answers by what stays resident.
    codecs: bits per value against errors and quality. Exit codes: 0 measured, 1 the engine failed,
    2 wrong usage, 3 no such model, 4 a broken one.
    """
    from expertmesh.deploy.bench.tiers_report import Wish, run_tiers

    wish = Wish(
        model=(model or BUNDLED).absolute(), parts=part or [], lengths=length or [1024, 4096],
        trials=trials, cold_trials=cold_trials or trials, probes=probes, tasks=task or [], out=out,
        threads=threads, as_json=as_json,
    )  # fmt: skip
    run_command(run_tiers, wish)
