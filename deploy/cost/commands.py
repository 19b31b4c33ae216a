"""`expertmesh cost`. Only typer is imported here, for `--help`."""

from pathlib import Path
from typing import Annotated, Any, Optional

import typer

from expertmesh.deploy.command import LOCAL_URL, URL, run_command

cost = typer.Typer(
    name="cost",
    help="What serving costs, in three ledgers that are kept apart: own load tests, bills of a "
    "platform, sessions. EXPERTMESH_API_KEY is sent to servers that ask for a key.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)

LEDGER: Any = typer.Option(
    help="Folder of the ledgers. Default: ~/.local/state/expertmesh/cost.",
    envvar="EXPERTMESH_COST_LEDGER",
)
GPUS: Any = typer.Option(help="How many are paid for. A machine without any counts as one.")
PRICE: Any = typer.Option(help="Your price; without one there is no cost.")
CURRENCY: Any = typer.Option(help="Of the price: three capitals.")
JSON: Any = typer.Option("--json", help="Print the record as JSON.")


@cost.command()
def load(
    requests: Annotated[int, typer.Option(min=1, help="In all.")] = 32,
    concurrency: Annotated[int, typer.Option(min=1, max=1024, help="At the same time.")] = 8,
    max_tokens: Annotated[int, typer.Option(min=1, help="Of each answer.")] = 64,
    prompts: Annotated[
        Optional[Path],  # noqa: UP045 (typer reads it)
        typer.Option(exists=True, dir_okay=False, help="A prompt a line, taken in turn."),
    ] = None,
    model: Annotated[str, typer.Option(help="Default: the server's first.")] = "",
    timeout: Annotated[float, typer.Option(min=0.1, help="Seconds for one answer.")] = 300.0,
    url: Annotated[str, URL] = LOCAL_URL,
    gpus: Annotated[str, GPUS] = "1",
    price_per_gpu_hour: Annotated[Optional[str], PRICE] = None,  # noqa: UP045
    currency: Annotated[Optional[str], CURRENCY] = None,  # noqa: UP045
    ledger: Annotated[Optional[Path], LEDGER] = None,  # noqa: UP045
    as_json: Annotated[bool, JSON] = False,
) -> None:
    """Put load on a running server and record what came of it.

    A request is complete when its stream ends with a finish_reason and [DONE]. Exit codes: 0 all
    complete, 1 some were not (recorded all the same), 2 wrong usage, 8 no answer.
    """
    from expertmesh.deploy.cost import actions
    from expertmesh.deploy.cost.load import PROMPTS, Plan

    texts = [] if prompts is None else prompts.read_text("utf-8", "replace").splitlines()
    lines = [line for line in texts if line.strip()]
    if prompts is not None and not lines:
        raise typer.BadParameter("holds no prompt", param_hint="--prompts")
    plan = Plan(url, model, requests, concurrency, max_tokens, lines or PROMPTS, timeout)
    price = run_command(actions.price_of, gpus, price_per_gpu_hour, currency)
    run_command(actions.run_load, plan, price, ledger, as_json)


@cost.command()
def session(
    url: Annotated[str, URL] = LOCAL_URL,
    gpus: Annotated[str, GPUS] = "1",
    price_per_gpu_hour: Annotated[Optional[str], PRICE] = None,  # noqa: UP045
    currency: Annotated[Optional[str], CURRENCY] = None,  # noqa: UP045
    ledger: Annotated[Optional[Path], LEDGER] = None,  # noqa: UP045
    as_json: Annotated[bool, JSON] = False,
) -> None:
    """Record what a server has done since its start, from its own counters.

    Run it as often as you like, the last time before the server stops: of one session the latest
    record counts. Exit codes: 0 recorded, 2 wrong usage, 8 no answer.
    """
    from expertmesh.deploy.cost import actions

    price = run_command(actions.price_of, gpus, price_per_gpu_hour, currency)
    run_command(actions.run_session, url, price, ledger, as_json)


@cost.command("import")
def import_bill(
    file: Annotated[Path, typer.Argument(help="CSV with a header, or a JSON list of objects.")],
    column: Annotated[
        Optional[list[str]],  # noqa: UP045
        typer.Option(
            help="OURS=THEIRS: where the export names a column otherwise. May be repeated."
        ),
    ] = None,
    ledger: Annotated[Optional[Path], LEDGER] = None,  # noqa: UP045
    as_json: Annotated[bool, JSON] = False,
) -> None:
    """Take over what a platform reports, from a file that you export there.

    Columns: start, end (ISO 8601), resource, cost, currency; and, if there are any, quantity, unit,
    invoice, prompt_tokens, generated_tokens, requests, completed. Others are left out. All lines
    are taken or none; lines that are there already are not taken again. Exit codes: 0 taken, 2 not.
    """
    from expertmesh.deploy.cost import actions

    run_command(actions.run_import, file, column or [], ledger, as_json)


@cost.command()
def report(
    ledger: Annotated[Optional[Path], LEDGER] = None,  # noqa: UP045
    as_json: Annotated[bool, JSON] = False,
) -> None:
    """What each ledger comes to: cost per million tokens, completion rate, peak memory, tokens/s.

    Exit codes: 0 all lines were read, 10 some were damaged (told with file and line, left out).
    """
    from expertmesh.deploy.cost import actions

    run_command(actions.run_report, ledger, as_json)
