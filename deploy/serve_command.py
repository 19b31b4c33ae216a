"""`expertmesh serve`: check, plan, start, wait, stop; leaving no process behind."""

import asyncio
import contextlib
import logging
import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Literal, cast

from rich.console import Console

from expertmesh.actors.attention.settings import EngineSettings
from expertmesh.actors.model.batch import PAGE_TOKENS
from expertmesh.actors.model.checkpoint import CheckpointError
from expertmesh.actors.model.config import ConfigError, ModelConfig
from expertmesh.actors.model.loading import LoadSettings
from expertmesh.actors.model.summary import CheckpointSummary
from expertmesh.actors.process import own_cores
from expertmesh.deploy import preflight
from expertmesh.deploy.exit_codes import ExitCode, Refused
from expertmesh.deploy.preflight import size_text

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ServeOptions:
    """The command's options as given; see `expertmesh serve --help`."""

    model: Path
    expert_actors: int
    attention_replicas: int
    address: str | None
    name: str
    host: str
    port: int
    served_model_name: str | None
    grace_seconds: int
    dtype: str
    max_model_len: int | None
    max_running: int
    kv_pages: int
    expert_cache_bytes: int
    dry_run: bool

    @property
    def one_process(self) -> bool:
        return self.expert_actors == 0 and self.attention_replicas == 1 and self.address is None

    def load(self) -> LoadSettings:
        kind = cast(Literal["auto", "float32", "bfloat16"], self.dtype)
        return LoadSettings(
            model=self.model, dtype=kind, expert_cache_bytes=self.expert_cache_bytes
        )

    def engine(self, config: ModelConfig) -> EngineSettings:
        return EngineSettings(
            pages=self.kv_pages, slots=self.max_running, max_context=self.context(config)
        )

    def context(self, config: ModelConfig) -> int:
        """What one request may use: never more than the model knows or all pages hold."""
        limits = [config.max_position, self.kv_pages * PAGE_TOKENS]
        return min([*limits, self.max_model_len] if self.max_model_len else limits)

    @property
    def served_name(self) -> str:
        return self.served_model_name or self.model.name


class Stopped(BaseException):
    """SIGINT or SIGTERM arrived. Not an Exception, so that nothing on the way swallows it."""


def _raise_stopped(signum: int, frame: FrameType | None) -> None:
    # Once: a second signal must not tear the stop itself apart.
    _handle_signals(signal.SIG_IGN)
    raise Stopped


def _handle_signals(handler: "signal._HANDLER") -> None:
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, handler)


def run(options: ServeOptions) -> None:
    """Returns after a stop signal. Raises Refused."""
    console = Console(stderr=True, highlight=False, soft_wrap=True)
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
    _handle_signals(_raise_stopped)
    try:
        config = preflight.check_folder(options.model)
        summary = preflight.check_checkpoint(options.model, config)
        preflight.check_placement(config, options.expert_actors)
        with preflight.hold_port(options.host, options.port):
            if options.address is not None and not options.dry_run:
                preflight.check_cluster(options.address)
            _check_memory(options, config, summary)
            _print_plan(console, options, config, summary)
            if options.dry_run:
                return
            # Held until the end: a start takes long, and the door shares its port with whoever
            # else shares it.
            if options.one_process:
                _serve_here(console, options, config)
            else:
                _serve_mesh(console, options, config)
    except Stopped:
        console.print("stopped")
    except SystemExit as ended:
        # ray.init replaces the handler of SIGTERM by one that exits with its number.
        if ended.code != signal.SIGTERM:
            raise
        console.print("stopped")


def _check_memory(options: ServeOptions, config: ModelConfig, summary: CheckpointSummary) -> None:
    if options.address is not None:
        return  # other machines' memory: their actors refuse by themselves
    plan = preflight.plan_memory(
        config,
        summary,
        options.load(),
        options.engine(config),
        options.attention_replicas,
        options.expert_actors,
    )
    preflight.check_memory(plan, options.kv_pages, preflight.available_memory())


def _print_plan(
    console: Console, options: ServeOptions, config: ModelConfig, summary: CheckpointSummary
) -> None:
    actors = (
        "one process"
        if options.one_process
        else f"{options.attention_replicas} attention + {options.expert_actors} expert actors"
    )
    parameters = summary.attention.parameters + summary.experts.parameters
    console.print(
        f"[bold]{options.served_name}[/] ({config.family}, {parameters / 1e6:.1f} M parameters, "
        f"{config.num_layers} layers, {config.num_experts} experts, "
        f"{config.experts_per_token} per token)"
    )
    console.print(
        f"  weights   {size_text(summary.text_bytes)} in {summary.shards} "
        f"shard{'s' if summary.shards > 1 else ''}, {options.dtype} compute, {actors}"
    )
    state = preflight.state_bytes(config, options.engine(config), 4)
    console.print(
        f"  state     {options.kv_pages} pages of {PAGE_TOKENS} tokens, {options.max_running} "
        f"slots, {size_text(state)} per replica; {options.context(config)} tokens a request"
    )
    console.print(f"  address   {_url(options)}")
    asked, given = options.max_model_len, options.context(config)
    if asked is not None and asked > given:
        console.print(
            f"[yellow]warning[/]: --max-model-len {asked} is cut to {given}: the model knows "
            f"{config.max_position} positions, and --kv-pages {options.kv_pages} hold "
            f"{options.kv_pages * PAGE_TOKENS} tokens"
        )


def _url(options: ServeOptions) -> str:
    host = f"[{options.host}]" if ":" in options.host else options.host
    return f"http://{host}:{options.port}"


def _announce(console: Console, options: ServeOptions, began: float) -> None:
    url, name = _url(options), options.served_name
    # Without a tokenizer the server takes token ids only.
    prompt = '"Once upon a time"' if preflight.has_tokenizer(options.model) else "[1, 2, 3]"
    console.print(f"[bold green]ready[/] after {time.monotonic() - began:.1f} s at {url}")
    console.print(
        f"  curl {url}/v1/completions -H 'content-type: application/json' "
        f'-d \'{{"model": "{name}", "prompt": {prompt}, "max_tokens": 40}}\'',
        markup=False,
    )


# --- one process --------------------------------------------------------------------------------


def _serve_here(console: Console, options: ServeOptions, config: ModelConfig) -> None:
    from expertmesh.deploy.listener import bind, http_server
    from expertmesh.deploy.one_process import start_local
    from expertmesh.deploy.openai.app import build_app
    from expertmesh.deploy.openai.describe import describe

    began = time.monotonic()
    listener = bind(options.host, options.port, shared=True)  # beside our own hold
    threads = max(1, own_cores() - 1)  # the event loop needs the last one
    try:
        server = start_local(options.load(), options.engine(config), threads)
    except (CheckpointError, ConfigError) as error:
        listener.close()
        raise preflight.bad_checkpoint(options.model, error) from error
    try:
        info = describe(
            options.model, config, name=options.served_name, max_model_len=options.context(config)
        )
        http = http_server(build_app(server.client, info), options.grace_seconds, lifespan=False)
        stop = _StopFlag()
        _handle_signals(stop)

        async def main() -> None:
            task = asyncio.create_task(http.serve(sockets=[listener]))
            while not http.started and not task.done():
                await asyncio.sleep(0.01)
            _announce(console, options, began)
            stop.on_set = lambda: setattr(http, "should_exit", True)
            await task

        asyncio.run(main())
    finally:
        _handle_signals(signal.SIG_IGN)
        with contextlib.suppress(TimeoutError):
            server.stop()
    console.print("stopped")


class _StopFlag:
    """A signal handler that only notes the signal, for code that must end by itself."""

    def __init__(self) -> None:
        self.on_set: Callable[[], None] = lambda: None

    def __call__(self, signum: int, frame: FrameType | None) -> None:
        self.on_set()


# --- on Ray -------------------------------------------------------------------------------------


def _serve_mesh(console: Console, options: ServeOptions, config: ModelConfig) -> None:
    from expertmesh.deploy.local_ray import Children

    began = time.monotonic()
    # Ray's processes inherit these.
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_SERVE_LOG_TO_STDERR", "0")
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    with Children():
        _run_mesh(console, options, config, began)


def _run_mesh(console: Console, options: ServeOptions, config: ModelConfig, began: float) -> None:
    import ray
    from ray import serve

    logging.getLogger("ray.serve").setLevel(logging.WARNING)

    from expertmesh.cluster.launch import LaunchError, Mesh, Progress, start
    from expertmesh.cluster.settings import ClusterSettings
    from expertmesh.deploy.serve_app import DoorSettings, door_application

    settings = ClusterSettings(
        load=options.load(),
        attention_replicas=options.attention_replicas,
        expert_actors=options.expert_actors,
        engine=options.engine(config),
        name=options.name,
        ray_address=options.address,
    )

    told = -1

    def progress(state: Progress) -> None:
        nonlocal told
        if state.done != told:
            told = state.done
            console.print(
                f"  loading   {size_text(state.done)} of {size_text(state.total)}, "
                f"{size_text(int(state.rate))}/s"
            )

    mesh: Mesh | None = None
    application = f"{options.name}-door"
    try:
        console.print("  starting  the mesh")
        try:
            mesh = start(settings, progress)
        except LaunchError as error:
            if _found_damage(error):
                raise preflight.bad_checkpoint(options.model, error) from error
            raise Refused(ExitCode.LAUNCH, f"the mesh did not start: {error}") from error
        except Exception as error:  # Ray's own start-up raises anything
            hint = "see Ray's logs under /tmp/ray/session_latest/logs"
            raise Refused(ExitCode.LAUNCH, f"Ray did not start: {error}", hint) from error
        _handle_signals(_raise_stopped)  # ray.init put its own handler in place
        console.print("  starting  the front door")
        door = DoorSettings(
            model=options.model,
            served_model_name=options.served_name,
            max_model_len=options.context(config),
            replicas=settings.actor_names[: settings.attention_replicas],
            namespace=settings.namespace,
            host=options.host,
            port=options.port,
            grace_seconds=options.grace_seconds,
        )
        here: str = ray.util.get_node_ip_address()  # type: ignore[no-untyped-call]
        try:
            serve.start(proxy_location="Disabled")
            handle = serve.run(
                door_application(door, here),
                name=application,
                route_prefix=None,
            )
        except (RuntimeError, TimeoutError, ray.exceptions.RayError) as error:
            raise Refused(ExitCode.LAUNCH, f"the front door did not start: {error}") from error
        _wait_ready(options, mesh)
        _announce(console, options, began)
        try:
            failed = mesh.wait_failed()
            console.print(f"[bold red]not ready[/]: {failed.reason}")
            while True:
                time.sleep(3600)  # answering 503 until somebody decides
        finally:
            _handle_signals(signal.SIG_IGN)
            with contextlib.suppress(Exception):
                handle.drain.remote().result(timeout_s=options.grace_seconds + 2)
    finally:
        _handle_signals(signal.SIG_IGN)
        if options.address is not None and ray.is_initialized():
            with contextlib.suppress(Exception):
                serve.delete(application)  # the cluster, and what else it serves, stays
        if mesh is not None:
            mesh.stop()
        if options.address is None:
            ray.shutdown()


def _found_damage(error: BaseException) -> bool:
    """Whether a start failed because of the checkpoint: here, or in an actor (then Ray's error
    carries the actor's as `cause`)."""
    cause = error.__cause__
    found = (cause, getattr(cause, "cause", None))
    return any(isinstance(one, CheckpointError | ConfigError) for one in found)


def _wait_ready(options: ServeOptions, mesh: object, limit: float = 60.0) -> None:
    """Returns when /ready says so, over the socket that clients will use."""
    import urllib.error
    import urllib.request

    host = "127.0.0.1" if options.host in ("0.0.0.0", "::") else options.host
    url = f"http://{f'[{host}]' if ':' in host else host}:{options.port}/ready"
    deadline, last = time.monotonic() + limit, "no answer"
    while time.monotonic() < deadline:
        try:
            with urllib.request.urlopen(url, timeout=5):
                return
        except urllib.error.HTTPError as error:
            last = error.read(500).decode("utf-8", "replace")
        except OSError as error:
            last = str(error)
        time.sleep(0.05)
    raise Refused(ExitCode.LAUNCH, f"the server was not ready within {limit:g} s: {last}")
