"""`expertmesh serve` on Ray: start the mesh and its front door, tell what happens, stop."""

import contextlib
import logging
import os
import signal
import sys
import time
from dataclasses import replace
from typing import TYPE_CHECKING, NoReturn

from rich.console import Console
from rich.markup import escape

from expertmesh.actors.model.config import ModelConfig
from expertmesh.deploy import preflight
from expertmesh.deploy.exit_codes import ExitCode, Refused
from expertmesh.deploy.hosts.token import offer_token
from expertmesh.deploy.mesh_news import Status, news
from expertmesh.deploy.preflight import size_text
from expertmesh.deploy.serve_console import announce, url_of
from expertmesh.deploy.serve_options import ServeOptions
from expertmesh.deploy.stop_signals import handle_signals, stop_by_signal

if TYPE_CHECKING:
    from expertmesh.cluster.keeper import Keeper
    from expertmesh.cluster.launch import Progress
    from expertmesh.cluster.settings import ClusterSettings

# Between two looks at the mesh, for what is printed; and how long a look may take.
NEWS_SECONDS = 0.5
STATUS_SECONDS = 30.0


def serve_mesh(
    console: Console, options: ServeOptions, config: ModelConfig, slots: int | None
) -> None:
    """Returns never; a signal ends it. Raises Refused. slots: expert slots per actor and layer."""
    from expertmesh.deploy.local_ray import Children

    began = time.monotonic()
    # Ray's processes inherit these.
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_SERVE_LOG_TO_STDERR", "0")
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    if options.address is not None:
        offer_token(os.environ)
    with Children():
        _run_mesh(console, options, config, slots, began)


def _run_mesh(
    console: Console, options: ServeOptions, config: ModelConfig, slots: int | None, began: float
) -> None:
    import ray
    from ray import serve

    logging.getLogger("ray.serve").setLevel(logging.WARNING)

    from expertmesh.deploy.serve_app import DoorSettings, admin_token, door_application

    settings = options.cluster(config, slots)
    keeper: Keeper | None = None
    application = f"{options.name}-door"
    try:
        console.print("  starting  the mesh")
        keeper = _start(console, options, settings)
        stop_by_signal()  # ray.init put its own handler in place
        console.print("  starting  the front door")
        door = DoorSettings(
            model=options.model,
            served_model_name=options.served_name,
            max_model_len=options.context(config),
            mesh=settings.mesh_name,
            namespace=settings.namespace,
            recovery=settings.recovery,
            admin_token=admin_token(),
            host=options.host,
            port=options.port,
            grace_seconds=options.grace_seconds,
            edge=options.edge,
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
        _wait_ready(options)
        announce(console, options, began)
        try:
            _tell_news(console, keeper)
        finally:
            handle_signals(signal.SIG_IGN)
            with contextlib.suppress(Exception):
                handle.drain.remote().result(timeout_s=options.grace_seconds + 2)
    finally:
        handle_signals(signal.SIG_IGN)
        if options.address is not None and ray.is_initialized():
            with contextlib.suppress(Exception):
                serve.delete(application)  # the cluster, and what else it serves, stays
        if keeper is not None:
            keeper.stop()
        if options.address is None:
            ray.shutdown()


def leave_at_once(code: int) -> NoReturn:
    """Ends this process without the interpreter's last rites, once all is stopped: a signal that
    came in the middle of Ray's start leaves threads that abort the process in them."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _start(console: Console, options: ServeOptions, settings: "ClusterSettings") -> "Keeper":
    """The running mesh. Raises Refused."""
    from expertmesh.cluster.keeper import start_keeper
    from expertmesh.cluster.launch import LaunchError

    told = -1

    def progress(state: "Progress") -> None:
        nonlocal told
        if state.done != told:
            told = state.done
            console.print(
                f"  loading   {size_text(state.done)} of {size_text(state.total)}, "
                f"{size_text(int(state.rate))}/s"
            )

    try:
        return start_keeper(settings, progress)
    except LaunchError as error:
        if error.damaged:
            raise preflight.bad_checkpoint(options.model, error) from error
        raise Refused(ExitCode.LAUNCH, f"the mesh did not start: {error}") from error
    except Exception as error:  # Ray's own start-up raises anything
        hint = "see Ray's logs under /tmp/ray/session_latest/logs"
        raise Refused(ExitCode.LAUNCH, f"Ray did not start: {error}", hint) from error


def _tell_news(console: Console, keeper: "Keeper") -> NoReturn:
    """Prints what happens to the mesh, until a signal ends it. Raises Refused when the keeper has
    died: with it, the mesh is gone."""
    import ray
    from ray.exceptions import GetTimeoutError, RayActorError

    from expertmesh.cluster.watch import first_line

    before: Status | None = None
    while True:
        try:
            after: Status = ray.get(keeper.handle.status.remote(), timeout=STATUS_SECONDS)
        except GetTimeoutError:
            console.print(f"[yellow]the mesh's keeper is silent[/] for {STATUS_SECONDS:g} s")
            continue
        except RayActorError as error:
            raise Refused(
                ExitCode.LAUNCH, f"the mesh's keeper has died: {first_line(error)}"
            ) from error
        for style, line in [] if before is None else news(before, after):
            console.print(f"  {time.strftime('%H:%M:%S')}  [{style}]{escape(line)}[/]")
        before = after
        time.sleep(NEWS_SECONDS)


def _wait_ready(options: ServeOptions, limit: float = 60.0) -> None:
    """Returns when /ready says so, over the socket that clients will use."""
    import ssl
    import urllib.error
    import urllib.request

    host = "127.0.0.1" if options.host in ("0.0.0.0", "::") else options.host
    url = f"{url_of(replace(options, host=host))}/ready"
    # This server's own port: no proxy of the environment, and a certificate that names what clients
    # call it.
    opener = urllib.request.build_opener(
        urllib.request.ProxyHandler({}),
        urllib.request.HTTPSHandler(context=ssl._create_unverified_context()),
    )
    tls = options.edge.http.tls
    deadline, last = time.monotonic() + limit, "no answer"
    while time.monotonic() < deadline:
        try:
            with opener.open(url, timeout=5):
                return
        except urllib.error.HTTPError as error:
            last = error.read(500).decode("utf-8", "replace")
        except OSError as error:
            cause = error.reason if isinstance(error, urllib.error.URLError) else error
            refusals = ssl.SSLError | ConnectionResetError
            if tls is not None and tls.client_ca_file and isinstance(cause, refusals):
                return  # it is there, and wants a certificate that only its clients have
            last = str(error)
        time.sleep(0.05)
    raise Refused(ExitCode.LAUNCH, f"the server was not ready within {limit:g} s: {last}")
