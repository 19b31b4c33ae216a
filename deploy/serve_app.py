"""The front door as Ray Serve runs it.

Two ways in, one app:
- `door_application`: a deployment that listens on its own port. `expertmesh serve` uses it. A
  chunk costs one socket write; through Serve's proxy it crosses two more processes, which measured
  0.45 ms of CPU a chunk against 0.03 ms, more than the engine spends on the token.
- `build_openai_app`: an ingress deployment behind Serve's proxies, for `serve run` and RayService
  configs, where placement, draining and routing are the platform's. It brings its mesh with it.
"""

import asyncio
import contextlib
import logging
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any, cast

import ray
from fastapi import FastAPI
from pydantic import BaseModel, ConfigDict, Field, SecretStr
from ray import serve
from ray.serve import Application

from expertmesh.actors.model.config import load_config
from expertmesh.actors.process import keep_heap
from expertmesh.cluster.keeper import start_keeper
from expertmesh.cluster.settings import ClusterSettings, RecoverySettings
from expertmesh.deploy.auth.keyring import environment_hashes
from expertmesh.deploy.edge_server import EdgeServer, open_grpc
from expertmesh.deploy.edge_settings import EdgeSettings
from expertmesh.deploy.front import Front
from expertmesh.deploy.listener import bind
from expertmesh.deploy.mesh_client import MeshClient
from expertmesh.deploy.openai.admin import Admin
from expertmesh.deploy.openai.app import build_app
from expertmesh.deploy.openai.describe import describe
from expertmesh.deploy.ray_client import RayEngineClient
from expertmesh.deploy.serve_scaling import seats_application

_log = logging.getLogger(__name__)

# Serve's proxy spends 0.45 ms of CPU a chunk: 500 chunks a second are a quarter of a core.
CHUNKS_BEHIND_PROXY = 500.0
# One thread per process: the door's numeric libraries compute nothing.
_ENV = {"env_vars": {"OMP_NUM_THREADS": "1"}}


class DoorSettings(BaseModel):
    """What a front-door process needs to know. Travels to it, so plain data only."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    model: Path
    served_model_name: str | None = None
    max_model_len: int | None = Field(None, ge=1)
    mesh: str = Field(description="Name of the actor that keeps the mesh.")
    namespace: str
    recovery: RecoverySettings = Field(default_factory=RecoverySettings)
    admin_token: SecretStr | None = Field(
        None, description="What /mesh asks for as a bearer token; unset: it answers this host only."
    )
    host: str = "127.0.0.1"
    port: int = Field(8000, ge=1, le=65535)
    grace_seconds: int = Field(10, ge=0)
    edge: EdgeSettings = Field(default_factory=EdgeSettings)
    alone_seconds: float = Field(
        20.0, gt=0, description="A door that listens by itself ends this long after its mesh."
    )


def door_app(settings: DoorSettings, behind_proxy: bool = False) -> tuple[Front, FastAPI]:
    """The OpenAI app over a mesh, which is found by its keeper's name."""
    config = load_config(settings.model)
    info = describe(
        settings.model,
        config,
        name=settings.served_model_name,
        max_model_len=settings.max_model_len,
        limits=settings.edge.limits(*([CHUNKS_BEHIND_PROXY] if behind_proxy else [])),
    )
    mesh = MeshClient(settings.mesh, settings.namespace)
    client = RayEngineClient(
        mesh.directory,
        partial(ray.get_actor, namespace=settings.namespace),
        hold_s=settings.recovery.hold_s,
        patience_s=settings.recovery.grace_s,
    )

    front = Front(client, info, settings.edge)
    front.telemetry.watch_placements()
    client.placed = front.telemetry.placed

    @asynccontextmanager
    async def connected(app: FastAPI) -> AsyncIterator[None]:
        client.start()
        # Serve's proxies carry HTTP; the engine protocol listens here, as EdgeServer does it.
        grpc = await open_grpc(front, settings.host) if behind_proxy else None
        yield
        if grpc is not None:
            await grpc.stop(settings.grace_seconds)
        await client.stop()

    token = settings.admin_token
    admin = Admin(mesh, None if token is None else token.get_secret_value())
    app = build_app(front, admin=admin, lifespan=connected, behind_proxy=behind_proxy)
    keep_heap()
    return front, app


class Door:
    """A front door that listens by itself. Serve starts, watches and replaces it."""

    async def __init__(self, settings: DoorSettings) -> None:  # type: ignore[misc]
        # Shared, so that a replacement can listen before the replica it replaces has let go.
        listener = bind(settings.host, settings.port, shared=True)
        front, app = await asyncio.to_thread(door_app, settings)
        self._server = EdgeServer(front, app, settings.host, settings.grace_seconds)
        await self._server.start(listener)
        self._leaving = asyncio.create_task(self._leave_with_mesh(settings))

    async def _leave_with_mesh(self, settings: DoorSettings) -> None:
        """Whoever started this server may have been killed before it could stop it: the mesh went
        along, and Serve would keep this door, and its port, for ever."""
        missed, looks = 0, 4
        while missed < looks:
            await asyncio.sleep(settings.alone_seconds / looks)
            gone = await asyncio.to_thread(_has_gone, settings.mesh, settings.namespace)
            missed = missed + 1 if gone else 0
        _log.error("the mesh %s has gone, and this front door with it", settings.mesh)
        application = serve.get_replica_context().app_name
        await asyncio.to_thread(partial(serve.delete, application, _blocking=False))

    async def check_health(self) -> None:
        """Raises when the listener has ended; Serve then replaces this replica."""
        if self._server.ended:
            raise RuntimeError("the HTTP listener has ended")

    async def drain(self) -> None:
        """No new connections; running answers get the grace time. Returns when all is done."""
        self._server.stop()
        await self._server.wait()


def _has_gone(actor: str, namespace: str) -> bool:
    """Whether Ray says that there is no such actor; a Ray that says nothing is no proof."""
    try:
        ray.get_actor(actor, namespace=namespace)
    except ValueError:
        return True
    except Exception:
        return False
    return False


def door_application(settings: DoorSettings, node_address: str) -> Application:
    """The listening front door, to be run with Serve's own proxies disabled.

    node_address: the node whose port it is; elsewhere in the cluster nobody would look for it.
    """
    deployment = _deployment(
        Door,
        name="door",
        num_replicas=1,
        max_ongoing_requests=1000,
        health_check_period_s=5,
        graceful_shutdown_timeout_s=settings.grace_seconds + 5,
        resources={f"node:{node_address}": 0.001},
    )
    return cast(Application, deployment.bind(settings))


def admin_token() -> SecretStr | None:
    """From the environment, where no list of processes shows it."""
    value = os.environ.get("EXPERTMESH_ADMIN_TOKEN", "").strip()
    return SecretStr(value) if value else None


def _deployment(kind: type, resources: dict[str, float] | None = None, **options: Any) -> Any:
    """A deployment that reserves no CPU slot and computes in one thread."""
    placed = {"num_cpus": 0, "runtime_env": _ENV, "resources": resources or {}}
    return serve.deployment(kind, ray_actor_options=placed, **options)


class MeshOwner:
    """Keeps a mesh for as long as Serve keeps this deployment. The mesh repairs itself; only when
    its keeper has died is there something for Serve to replace."""

    def __init__(self, settings: ClusterSettings) -> None:
        self._keeper = start_keeper(settings)

    def check_health(self) -> None:
        """Raises RayError when the keeper is gone."""
        self._keeper.directory()

    def __del__(self) -> None:
        with contextlib.suppress(Exception):
            self._keeper.stop()


class AppSettings(BaseModel):
    """Arguments of `serve run` and of `args:` in a Serve config. Unknown keys are refused."""

    model_config = ConfigDict(frozen=True, extra="forbid", hide_input_in_errors=True)

    mesh: ClusterSettings
    served_model_name: str | None = None
    max_model_len: int | None = Field(None, ge=1)
    front_doors: int = Field(1, ge=1, description="Replicas of the ingress deployment.")
    edge: EdgeSettings = Field(default_factory=EdgeSettings)


def build_openai_app(args: dict[str, Any]) -> Application:
    """Mesh and front door as one Serve application behind Serve's proxies.

    Keys in EXPERTMESH_API_KEYS of this process count as well; only their hashes leave it.
    """
    settings = AppSettings.model_validate(args)
    auth = settings.edge.auth.with_hashes(environment_hashes(os.environ))
    mesh = settings.mesh
    parts: list[Any] = []
    if mesh.autoscale is not None and mesh.autoscale.attention is not None:
        parts.append(
            seats_application(
                mesh.mesh_name,
                mesh.namespace,
                mesh.attention_replicas,
                mesh.autoscale.attention,
                dry_run=mesh.autoscale.dry_run,
            )
        )
        # Serve decides the number of attention replicas; the mesh itself must not.
        left = mesh.autoscale.model_copy(update={"attention": None})
        mesh = mesh.model_copy(update={"autoscale": left})
    door = DoorSettings(
        model=mesh.load.model,
        served_model_name=settings.served_model_name,
        max_model_len=settings.max_model_len,
        mesh=mesh.mesh_name,
        namespace=mesh.namespace,
        recovery=mesh.recovery,
        admin_token=admin_token(),
        edge=settings.edge.model_copy(update={"auth": auth}),
    )
    owner = _deployment(
        MeshOwner,
        name="mesh",
        num_replicas=1,
        health_check_period_s=2,
        graceful_shutdown_timeout_s=20,
        resources=dict(mesh.resources.control),
    ).bind(mesh)

    # Serve builds the app on the replica; nothing of it has to be pickled.
    @serve.ingress(lambda: door_app(door, behind_proxy=True)[1])
    class Ingress:
        def __init__(self, *parts: Any) -> None:
            self._parts = parts  # ties the mesh and what scales it to this application

    deployment = _deployment(
        Ingress,
        name="openai",
        num_replicas=settings.front_doors,
        resources=dict(mesh.resources.front_door),
        max_ongoing_requests=10_000,
        graceful_shutdown_timeout_s=30,
    )
    return cast(Application, deployment.bind(owner, *parts))
