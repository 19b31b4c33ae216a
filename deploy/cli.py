"""The command line. Only typer is imported here: `--help` must not wait for torch."""

import math
import re
from functools import partial
from pathlib import Path
from typing import Annotated, Optional

import typer

from expertmesh import __version__
from expertmesh.deploy import state_flags
from expertmesh.deploy.auth.commands import keys
from expertmesh.deploy.bench.commands import bench
from expertmesh.deploy.command import LOCAL_URL, URL, option, run_command
from expertmesh.deploy.cost.commands import cost
from expertmesh.deploy.doctor.commands import doctor
from expertmesh.deploy.eval.commands import evaluation
from expertmesh.deploy.hosts.commands import cluster
from expertmesh.deploy.routing.commands import routing
from expertmesh.deploy.sessions.commands import sessions
from expertmesh.deploy.verify.commands import verify

# As ClusterSettings.name wants it, known here without importing that.
MESH_NAME = r"[a-z0-9]([a-z0-9-]{0,40}[a-z0-9])?"
BUNDLED = Path(__file__).resolve().parent / "models" / "nano"

app = typer.Typer(
    name="expertmesh",
    help="An expert-parallel inference server for Kimi K3-style models.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    # EXPERTMESH_SERVE_PORT is --port of `expertmesh serve`.
    context_settings={"auto_envvar_prefix": "EXPERTMESH"},
)
app.add_typer(routing, name="routing")
app.add_typer(cluster, name="cluster")
app.add_typer(keys, name="keys")
app.add_typer(bench, name="bench")
app.add_typer(cost, name="cost")
app.add_typer(evaluation, name="eval")
app.add_typer(sessions, name="sessions")
app.command()(verify)
app.command()(doctor)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"expertmesh {__version__}")
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool,
        # Without a variable: EXPERTMESH_VERSION is what images and pipelines call other things, and
        # would end every command with exit code 0 before it has done anything.
        typer.Option(
            "--version",
            callback=_version,
            is_eager=True,
            help="Print and exit.",
            allow_from_autoenv=False,
        ),
    ] = False,
) -> None:
    """An expert-parallel inference server for Kimi K3-style models."""


_MESH, _SCALING, _EDGE, _MODEL = "Mesh", "Autoscaling", "Edge", "Model"


def _read_config(context: typer.Context, path: Path | None) -> Path | None:
    """Makes the file's values the defaults of the options that are read after this one."""
    if path is not None and not context.resilient_parsing:
        from expertmesh.deploy.config_file import read_config

        options = {option.name: option for option in context.command.params if option.name}
        del options["config"], options["dry_run"]
        taken = {name: partial(one.process_value, context) for name, one in options.items()}
        context.default_map, context.obj = run_command(read_config, path, taken)
    return path


def _one_of(flag: str, value: str, *choices: str) -> None:
    if value not in choices:
        *most, last = choices
        raise typer.BadParameter(f"{value!r} must be {', '.join(most)} or {last}", param_hint=flag)


def _bytes(flag: str, gigabytes: float) -> int:
    """Raises BadParameter for what no size is: infinite, or beyond all numbers."""
    if not math.isfinite(size := gigabytes * 1e9):
        raise typer.BadParameter(f"{gigabytes} must be a finite number", param_hint=flag)
    return int(size)


def _pages(flag: str, tokens: int) -> int:
    if tokens % 64:
        raise typer.BadParameter(f"{tokens} must be a multiple of 64", param_hint=flag)
    return tokens


def _positive(flag: str, value: float) -> float:
    """Not infinite either, nor no number."""
    if not 0 < value < math.inf:
        raise typer.BadParameter(f"{value} must be above 0 and finite", param_hint=flag)
    return value


@app.command()
def serve(
    context: typer.Context,
    model: Annotated[
        Optional[Path],  # noqa: UP045 (typer reads it)
        typer.Argument(help="Checkpoint folder. Default: the bundled nano model."),
    ] = None,
    expert_actors: Annotated[
        int,
        option(
            min=0,
            rich_help_panel=_MESH,
            help="Processes that share the experts. 0: everything in one process.",
        ),
    ] = 2,
    attention_replicas: Annotated[
        int, option(min=1, rich_help_panel=_MESH, help="Engines, each with its own state.")
    ] = 1,
    slots_per_actor: Annotated[
        Optional[int],  # noqa: UP045
        option(
            min=1,
            rich_help_panel=_MESH,
            help="Experts of each layer that an expert actor may hold. Default: as many as it "
            "takes to lose any one actor, if the memory allows.",
        ),
    ] = None,
    hold_seconds: Annotated[
        float,
        option(
            min=1,
            rich_help_panel=_MESH,
            help="How long running requests wait for a mesh that cannot serve.",
        ),
    ] = 60.0,
    rebalance_seconds: Annotated[
        float,
        option(
            min=0,
            rich_help_panel=_MESH,
            help="Time between two looks at the balance of the experts. 0: never.",
        ),
    ] = 30.0,
    address: Annotated[
        Optional[str],  # noqa: UP045
        option(
            rich_help_panel=_MESH,
            help='Ray cluster to use: "auto" or HOST:PORT. Default: start a local one.',
        ),
    ] = None,
    attention_resource: Annotated[
        Optional[str],  # noqa: UP045
        option(
            rich_help_panel=_MESH,
            help="Custom Ray resource of which each engine takes 1: only nodes that offer it are "
            "used.",
        ),
    ] = None,
    expert_resource: Annotated[
        Optional[str],  # noqa: UP045
        option(rich_help_panel=_MESH, help="The same for the expert actors."),
    ] = None,
    name: Annotated[
        str, option(rich_help_panel=_MESH, help="Prefix of the actors' names.")
    ] = "expertmesh",
    routing_record: Annotated[
        Optional[Path],  # noqa: UP045
        option(
            exists=True,
            dir_okay=False,
            rich_help_panel=_MESH,
            help="Traffic of `expertmesh routing record`: experts that tokens choose together "
            "begin on the same actor.",
        ),
    ] = None,
    min_expert_actors: Annotated[
        Optional[int],  # noqa: UP045
        option(min=1, rich_help_panel=_SCALING, help="Never fewer. Default: 1."),
    ] = None,
    max_expert_actors: Annotated[
        Optional[int],  # noqa: UP045
        option(
            min=1,
            rich_help_panel=_SCALING,
            help="Never more. Default: the pool keeps its size.",
        ),
    ] = None,
    min_attention_replicas: Annotated[
        Optional[int],  # noqa: UP045
        option(min=1, rich_help_panel=_SCALING, help="Never fewer. Default: 1."),
    ] = None,
    max_attention_replicas: Annotated[
        Optional[int],  # noqa: UP045
        option(
            min=1,
            rich_help_panel=_SCALING,
            help="Never more. Default: the pool keeps its size.",
        ),
    ] = None,
    autoscale_dry_run: Annotated[
        bool,
        option(
            "--autoscale-dry-run",
            rich_help_panel=_SCALING,
            help="Log what the autoscaler would do, and do nothing.",
        ),
    ] = False,
    host: Annotated[str, option(rich_help_panel=_EDGE)] = "127.0.0.1",
    port: Annotated[int, option(min=1, max=65535, rich_help_panel=_EDGE)] = 8000,
    grpc_port: Annotated[
        Optional[int],  # noqa: UP045
        option(
            min=1,
            max=65535,
            rich_help_panel=_EDGE,
            help="Port of the gRPC engine protocol. Default: none.",
        ),
    ] = None,
    api_keys: Annotated[
        Optional[Path],  # noqa: UP045
        option(
            exists=True,
            dir_okay=False,
            rich_help_panel=_EDGE,
            help="File of API keys as hashes, see `expertmesh keys`. Default: no key is asked for.",
        ),
    ] = None,
    config: Annotated[
        Optional[Path],  # noqa: UP045
        option(
            exists=True,
            dir_okay=False,
            is_eager=True,
            callback=_read_config,
            rich_help_panel=_EDGE,
            help="YAML file of these options (max_running: 64) and of the sections http, grpc, "
            "auth and queue. Flags win.",
        ),
    ] = None,
    served_model_name: Annotated[
        Optional[str],  # noqa: UP045
        option(rich_help_panel=_EDGE, help="Default: the folder's name."),
    ] = None,
    grace_seconds: Annotated[
        int,
        option(
            min=0,
            rich_help_panel=_EDGE,
            help="How long running answers may go on after a stop signal.",
        ),
    ] = 10,
    dtype: Annotated[
        str, option(rich_help_panel=_MODEL, help="auto, float32 or bfloat16.")
    ] = "auto",
    kernels: Annotated[
        str,
        option(
            rich_help_panel=_MODEL,
            help="auto, triton, torch or reference; then operators that differ: "
            "auto,sample=torch. See `expertmesh doctor`.",
        ),
    ] = "auto",
    decode_graphs: Annotated[
        str,
        option(
            rich_help_panel=_MODEL,
            help="Decode steps as CUDA graphs: auto (where they can be recorded), on or off.",
        ),
    ] = "auto",
    max_model_len: Annotated[
        Optional[int],  # noqa: UP045
        option(
            min=1,
            rich_help_panel=_MODEL,
            help="Most tokens of prompt and answer. Default: the model's, or what "
            "--kv-pages holds.",
        ),
    ] = None,
    max_running: Annotated[
        int,
        option(
            min=1, rich_help_panel=_MODEL, help="Sequences per replica that run at the same time."
        ),
    ] = 32,
    kv_pages: Annotated[
        int,
        option(min=1, rich_help_panel=_MODEL, help="64-token pages of latent cache per replica."),
    ] = 512,
    expert_cache_gb: Annotated[
        float,
        option(
            min=0,
            rich_help_panel=_MODEL,
            help="Decoded experts kept per process, beside the packed ones.",
        ),
    ] = 1.0,
    prefix_cache: Annotated[bool, state_flags.PREFIX_CACHE] = True,
    kv_snapshots: Annotated[int, state_flags.SNAPSHOTS] = 16,
    host_cache_gb: Annotated[float, state_flags.HOST_CACHE] = 0.25,
    state_dir: Annotated[Optional[Path], state_flags.DIR] = None,  # noqa: UP045
    state_dir_gb: Annotated[Optional[float], state_flags.DIR_SIZE] = None,  # noqa: UP045
    state_dir_mb_per_s: Annotated[float, state_flags.DIR_RATE] = 64.0,
    kv_read_seconds: Annotated[float, state_flags.READ_SECONDS] = 2.0,
    kv_checkpoint_tokens: Annotated[int, state_flags.CHECKPOINTS] = 256,
    sessions_per_tenant: Annotated[int, state_flags.SESSIONS] = 1024,
    session_ttl_seconds: Annotated[int, state_flags.SESSION_TTL] = 86_400,
    kv_mode: Annotated[str, state_flags.MODE] = "exact",
    kv_offload_gb: Annotated[float, state_flags.OFFLOAD] = 0.25,
    kv_offload_disk_gb: Annotated[float, state_flags.OFFLOAD_DISK] = 0.0,
    kv_window: Annotated[int, state_flags.WINDOW] = 4096,
    kv_sinks: Annotated[int, state_flags.SINKS] = 64,
    kv_select_pages: Annotated[int, state_flags.SELECT_PAGES] = 64,
    kv_select_mass: Annotated[float, state_flags.SELECT_MASS] = 0.98,
    kv_codec: Annotated[str, state_flags.CODEC] = "lossless",
    dry_run: Annotated[
        bool, option("--dry-run", help="Check everything, print the plan, start nothing.")
    ] = False,
) -> None:
    """Serve a checkpoint over the OpenAI API.

    Each option is also a variable (EXPERTMESH_SERVE_MAX_RUNNING) and a key of the --config file
    (max_running: 64).

    Exit codes: 0 stopped by a signal, 2 wrong usage, 3 no such model, 4 broken checkpoint, 5 port
    not usable, 6 not enough memory, 7 the mesh did not start.
    """
    from expertmesh.deploy.edge_settings import EdgeSettings
    from expertmesh.deploy.serve_command import run
    from expertmesh.deploy.serve_options import ServeOptions, with_flags

    if not re.fullmatch(MESH_NAME, name):
        raise typer.BadParameter(f"must match {MESH_NAME}", param_hint="--name")
    _one_of("--dtype", dtype, "auto", "float32", "bfloat16")
    _one_of("--decode-graphs", decode_graphs, "auto", "on", "off")
    _one_of("--kv-mode", kv_mode, "exact", "offload", "select")
    _one_of("--kv-codec", kv_codec, "raw", "lossless", "int8", "int4")
    options = ServeOptions(
        model=(model or BUNDLED).absolute(),
        expert_actors=expert_actors,
        attention_replicas=attention_replicas,
        slots_per_actor=slots_per_actor,
        hold_seconds=hold_seconds,
        rebalance_seconds=rebalance_seconds,
        min_expert_actors=min_expert_actors,
        max_expert_actors=max_expert_actors,
        min_attention_replicas=min_attention_replicas,
        max_attention_replicas=max_attention_replicas,
        autoscale_dry_run=autoscale_dry_run,
        routing_record=None if routing_record is None else routing_record.absolute(),
        address=address,
        attention_resource=attention_resource,
        expert_resource=expert_resource,
        name=name,
        host=host,
        port=port,
        served_model_name=served_model_name,
        grace_seconds=grace_seconds,
        dtype=dtype,
        kernels=kernels,
        decode_graphs=decode_graphs,
        max_model_len=max_model_len,
        max_running=max_running,
        kv_pages=kv_pages,
        expert_cache_bytes=_bytes("--expert-cache-gb", expert_cache_gb),
        prefix_cache=prefix_cache,
        kv_snapshots=kv_snapshots,
        host_cache_bytes=_bytes("--host-cache-gb", host_cache_gb),
        state_dir=None if state_dir is None else state_dir.absolute(),
        state_dir_bytes=None if state_dir_gb is None else _bytes("--state-dir-gb", state_dir_gb),
        state_dir_bytes_per_s=1e6 * _positive("--state-dir-mb-per-s", state_dir_mb_per_s),
        kv_read_seconds=_positive("--kv-read-seconds", kv_read_seconds),
        kv_checkpoint_tokens=_pages("--kv-checkpoint-tokens", kv_checkpoint_tokens),
        sessions_per_tenant=sessions_per_tenant,
        session_ttl_seconds=session_ttl_seconds,
        kv_mode=kv_mode,
        kv_offload_bytes=_bytes("--kv-offload-gb", kv_offload_gb),
        kv_offload_disk_bytes=_bytes("--kv-offload-disk-gb", kv_offload_disk_gb),
        kv_window=_pages("--kv-window", kv_window),
        kv_sinks=_pages("--kv-sinks", kv_sinks),
        kv_select_pages=kv_select_pages,
        kv_select_mass=_positive("--kv-select-mass", kv_select_mass),
        kv_codec=kv_codec,
        dry_run=dry_run,
        edge=run_command(with_flags, context.obj or EdgeSettings(), grpc_port, api_keys),
    )
    run_command(run, options)


@app.command()
def scale(
    url: Annotated[str, URL] = LOCAL_URL,
    experts: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(help='Expert actors: how many, or "+1" and "-1".'),
    ] = None,
    attention: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(help='Attention replicas: how many, or "+1" and "-1".'),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Check and show, change nothing.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the server's answer.")] = False,
) -> None:
    """Change how many actors a running server has. Without a wish, show those it has.

    EXPERTMESH_ADMIN_TOKEN is sent when it is set. Exit codes: 0 done, 2 a wish that cannot be met,
    8 no answer or no permission.
    """
    from expertmesh.deploy.scale_command import scale as ask

    run_command(ask, url, experts, attention, dry_run, as_json)


def main() -> None:
    """Entry point of the console script and of `python -m expertmesh`."""
    app()
