"""`expertmesh serve`: check, plan, start, wait, stop; leaving no process behind."""

import asyncio
import contextlib
import logging
import signal
import sys
import time
from collections.abc import Callable
from types import FrameType

import torch
from rich.console import Console

from expertmesh.actors.model.checkpoint import CheckpointError
from expertmesh.actors.model.config import ConfigError, ModelConfig
from expertmesh.actors.model.loading import placed
from expertmesh.actors.model.summary import CheckpointSummary
from expertmesh.actors.process import own_cores
from expertmesh.cluster.settings import OBJECT_STORE_BYTES
from expertmesh.deploy import preflight
from expertmesh.deploy.exit_codes import ExitCode, Refused
from expertmesh.deploy.preflight import size_text
from expertmesh.deploy.serve_console import announce, print_mesh, print_plan
from expertmesh.deploy.serve_options import ServeOptions
from expertmesh.deploy.state_checks import check_kv_mode, check_state_folder
from expertmesh.deploy.stop_signals import Stopped, handle_signals, stop_by_signal


def run(options: ServeOptions) -> None:
    """Ends with a stop signal: returns, or leaves at once where Ray ran. Raises Refused."""
    console = Console(stderr=True, highlight=False, soft_wrap=True)
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
    stop_by_signal()
    try:
        config = preflight.check_folder(options.model)
        summary = preflight.check_checkpoint(options.model, config)
        preflight.check_placement(config, options.expert_actors)
        preflight.check_slots(config, options.expert_actors, options.slots_per_actor)
        preflight.check_recording(config, options.routing_record)
        preflight.check_kernels(options.kernels, options.compute, options.address is None)
        preflight.check_graphs(options.graphs, options.kernels, options.address is None)
        options.autoscale(config)
        _check_state(console, options, config)
        grpc = options.edge.grpc
        preflight.check_tls("http", options.edge.http.tls)
        preflight.check_tls("grpc", grpc.tls)
        if grpc.port == options.port:
            raise Refused(ExitCode.USAGE, f"HTTP and gRPC cannot share port {options.port}")
        with (
            preflight.hold_port(options.host, options.port),
            preflight.hold_port(grpc.host or options.host, grpc.port, "--grpc-port")
            if grpc.port
            else contextlib.nullcontext(),
        ):
            if options.address is not None and not options.dry_run:
                preflight.check_cluster(options.address)
            slots = _choose_slots(console, options, config, summary)
            print_plan(console, options, config, summary)
            print_mesh(console, options, config, slots)
            _warn_of_shm(console, options)
            if options.dry_run:
                return
            # Held until the end: a start takes long, and the door shares its port with whoever
            # else shares it.
            if options.one_process:
                _serve_here(console, options, config)
            else:
                from expertmesh.deploy.serve_mesh import serve_mesh

                serve_mesh(console, options, config, slots)
    except Stopped:
        _stopped(console)
    except SystemExit as ended:
        # ray.init replaces the handler of SIGTERM by one that exits with its number.
        if ended.code != signal.SIGTERM:
            raise
        _stopped(console)


def _check_state(console: Console, options: ServeOptions, config: ModelConfig) -> None:
    state = options.state()
    away = options.address is not None  # where the latents may be smaller than here
    dtype = torch.bfloat16 if away else placed("auto", options.compute)[1]
    check_kv_mode(config, options.engine(config), dtype)
    if away:
        return  # folders of other machines: their actors look by themselves
    if warning := check_state_folder(state, config, options.context(config), dtype):
        console.print(f"[yellow]warning[/]: {warning}")


def _warn_of_shm(console: Console, options: ServeOptions) -> None:
    if options.one_process or options.address is not None:
        return  # no Ray, or one that has been started
    if warning := preflight.shm_warning(OBJECT_STORE_BYTES):
        console.print(f"[yellow]warning[/]: {warning}")


def _stopped(console: Console) -> None:
    console.print("stopped")
    if "ray" in sys.modules:
        from expertmesh.deploy.serve_mesh import leave_at_once

        leave_at_once(0)


def _choose_slots(
    console: Console, options: ServeOptions, config: ModelConfig, summary: CheckpointSummary
) -> int | None:
    """Expert slots per actor and layer; None leaves them to the mesh, which then takes as many as
    it needs to lose any one actor. Raises Refused when the memory does not hold them."""
    asked, actors = options.slots_per_actor, options.expert_actors
    if options.address is not None:
        return asked  # other machines' memory: their actors refuse by themselves
    free = preflight.available_memory()

    def plan(slots: int) -> preflight.MemoryPlan:
        return preflight.plan_memory(
            config, summary, options.load(), options.engine(config),
            options.attention_replicas, actors, slots,
        )  # fmt: skip

    wanted = options.cluster(config, asked).slots(config.num_experts, actors) if actors else 0
    if asked is not None or plan(wanted).total <= free:
        preflight.check_memory(plan(wanted), options.kv_pages, free)
        return asked
    bare = preflight.even_share(config, actors) if actors else 0
    preflight.check_memory(plan(bare), options.kv_pages, free)
    console.print(
        f"[yellow]warning[/]: {size_text(free)} hold {bare} expert slots per actor, not the "
        f"{wanted} that the loss of an actor needs ({size_text(plan(wanted).total)}): after one, "
        "the mesh waits for its replacement"
    )
    return bare


def _serve_here(console: Console, options: ServeOptions, config: ModelConfig) -> None:
    from expertmesh.deploy.edge_server import EdgeServer
    from expertmesh.deploy.front import Front
    from expertmesh.deploy.listener import bind
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
            options.model,
            config,
            name=options.served_name,
            max_model_len=options.context(config),
            limits=options.edge.limits(),
        )
        front = Front(server.client, info, options.edge)
        edge = EdgeServer(front, build_app(front), options.host, options.grace_seconds)
        stop = _StopFlag()
        handle_signals(stop)

        async def main() -> None:
            await edge.start(listener)
            announce(console, options, began)
            stop.on_set = edge.stop
            await edge.wait()

        asyncio.run(main())
    finally:
        handle_signals(signal.SIG_IGN)
        with contextlib.suppress(TimeoutError):
            server.stop()
    console.print("stopped")


class _StopFlag:
    """A signal handler that only notes the signal, for code that must end by itself."""

    def __init__(self) -> None:
        self.on_set: Callable[[], None] = lambda: None

    def __call__(self, signum: int, frame: FrameType | None) -> None:
        self.on_set()
