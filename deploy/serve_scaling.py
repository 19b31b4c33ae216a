"""Attention replicas scaled by Ray Serve: its autoscaler decides with this project's numbers.

Each attention replica has a seat, a Serve replica that computes nothing. The seat publishes how
full its attention replica is; Serve's controller calls `AttentionPolicy` with what all seats
published, and starts or stops seats; the first seat tells the mesh how many there are. So Serve's
own bounds, delays, dashboards and target capacity hold for attention replicas too.

The number is told again and again, never as a change: a seat that dies without a word, or a mesh
that is replaced, leaves nothing to clean up. What an operator asks of the mesh directly is taken
back by it, as Serve's bounds are the operator's place to say so here.
"""

import asyncio
import logging
import time
from typing import Any, Protocol, cast

import msgspec
import ray
from ray import serve
from ray.exceptions import RayError
from ray.serve import Application
from ray.serve.config import AutoscalingConfig, AutoscalingContext, AutoscalingPolicy
from ray.serve.exceptions import RayServeException

from expertmesh.actors.attention.actor import ReplicaStats
from expertmesh.cluster.autoscaling.settings import AttentionScaling
from expertmesh.cluster.autoscaling.signals import AttentionSignals, Want, known, occupancy
from expertmesh.cluster.autoscaling.wants import want_attention
from expertmesh.cluster.directory import ScaleError
from expertmesh.deploy.engine_client import EngineUnavailable
from expertmesh.deploy.mesh_client import MeshClient

_log = logging.getLogger("ray.serve")

SEATS = "attention"
# How often a seat looks at the mesh, and Serve averages what seats published over how long.
LOOK_S = 1.0
LOOK_BACK_S = 10.0
# A mesh that could not add a replica takes the wish back; it is asked again after this long.
ASK_AGAIN_S = 30.0
# An attention replica that has not answered by then counts as silent. Below Serve's 10 s.
ANSWER_S = 3.0


class AttentionPolicy:
    """Serve's custom policy. Serve applies bounds and delays to what it returns."""

    def __init__(self, settings: dict[str, Any], dry_run: bool = False) -> None:
        """settings: of AttentionScaling, as JSON, which is what Serve can carry."""
        self._settings, self._dry_run = AttentionScaling.model_validate(settings), dry_run

    def __call__(self, context: AutoscalingContext) -> tuple[int, dict[str, Any]]:
        """(target, state until the next call). Keeps the target when a seat has not answered."""
        target = context.target_num_replicas
        signals = seat_signals(context)
        if signals is None or context.current_num_replicas != target:
            return target, {}
        want = want_attention(signals, target, self._settings)
        count = self._paced(want, target, context)
        if count != target and context.policy_state.get("asked") != count:
            verb = "dry run, would go" if self._dry_run else "asks to go"
            _log.info("attention seats: %s from %d to %d: %s", verb, target, count, want.reason)
        return (target if self._dry_run else count), {"asked": count}

    def _paced(self, want: Want, target: int, context: AutoscalingContext) -> int:
        """Serve has delays, but no cool-downs and no largest step."""
        settings, now = self._settings, context.current_time or 0.0
        changed = max(context.last_scale_up_time or 0.0, context.last_scale_down_time or 0.0)
        if want.count > target and now - changed >= settings.up_cooldown_s:
            return min(want.count, target + settings.max_step_up)
        if want.count < target and now - changed >= settings.down_cooldown_s:
            return target - 1
        return target


def seat_signals(context: AutoscalingContext) -> AttentionSignals | None:
    """From what the seats published; None unless every seat's replica answered all the time."""
    metrics, seats = context.aggregated_metrics or {}, context.running_replicas
    columns = [metrics.get(name, {}) for name in ("answers", "occupancy", "queued_tokens")]
    if not seats or any(seat not in column for seat in seats for column in columns):
        return None
    answers, used, queued = ([column[seat] for seat in seats] for column in columns)
    if min(answers) < 1.0 or not known(*used, *queued):
        return None
    return AttentionSignals(sum(used) / len(seats), sum(queued))


class MeshControl(Protocol):
    """The part of MeshClient that seats use."""

    async def status(self) -> dict[str, Any]: ...

    async def scale(self, experts: None, attention: int, dry_run: bool) -> dict[str, Any]: ...


class Wish:
    """Makes the mesh want as many attention replicas as there are seats."""

    def __init__(self, mesh: MeshControl) -> None:
        self._mesh = mesh
        self._asked: tuple[int, float] = (0, -ASK_AGAIN_S)  # how many, and when

    async def tell(self, seats: int, now_s: float) -> None:
        """Asks for `seats` replicas unless that is what is wanted already or was asked just now."""
        desired = (await self._mesh.status())["desired"]["attention"]
        count, when = self._asked
        if seats in (0, desired) or (count == seats and now_s - when < ASK_AGAIN_S):
            return
        self._asked = seats, now_s
        try:
            await self._mesh.scale(None, seats, False)
            _log.info("attention replicas: %d -> %d, one per seat", desired, seats)
        except ScaleError as error:
            _log.warning("attention replicas: %d -> %d refused: %s", desired, seats, error)


class AttentionSeat:
    """One Serve replica per attention replica."""

    async def __init__(  # type: ignore[misc]
        self, mesh: str, namespace: str, dry_run: bool = False
    ) -> None:
        """mesh: name of the keeper's Ray actor. dry_run: the mesh is told nothing."""
        self._namespace, self._mesh = namespace, MeshClient(mesh, namespace)
        self._dry_run = dry_run
        self._wish = Wish(cast(MeshControl, self._mesh))
        self._task = asyncio.create_task(self._keep_telling())

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """Called by Serve. answers: 1 when this seat has an attention replica that did."""
        try:
            replicas = [r for r in (await self._mesh.status())["attention"] if not r["leaving"]]
            name = replicas[_rank()]["actor"]
            actor = await asyncio.to_thread(ray.get_actor, name, namespace=self._namespace)
            answer = await asyncio.wait_for(_bytes(actor.stats.remote()), ANSWER_S)
        except (EngineUnavailable, RayError, IndexError, ValueError, TimeoutError):
            return {"answers": 0.0, "occupancy": 0.0, "queued_tokens": 0.0}
        engine = msgspec.msgpack.decode(answer, type=ReplicaStats).engine
        return {
            "answers": 1.0,
            "occupancy": occupancy(engine),
            "queued_tokens": float(engine.waiting_tokens),
        }

    def check_health(self) -> None:
        """Raises when this seat has stopped telling; Serve then replaces it."""
        if self._task.done():
            raise RuntimeError("the seat has stopped")

    async def _keep_telling(self) -> None:
        while True:
            await asyncio.sleep(LOOK_S)
            try:
                if _rank() == 0 and not self._dry_run:
                    await self._wish.tell(await asyncio.to_thread(_seats), time.monotonic())
            except (EngineUnavailable, RayError, RayServeException, KeyError) as error:
                # KeyError: the application is not listed yet.
                _log.warning("attention seats: %r", error)


def seats_application(
    mesh: str, namespace: str, replicas: int, settings: AttentionScaling, *, dry_run: bool = False
) -> Application:
    """The seats of a mesh, to be run beside its front doors. replicas: that it starts with."""
    policy = AutoscalingPolicy(  # type: ignore[no-untyped-call]
        policy_function=f"{__name__}:{AttentionPolicy.__name__}",
        policy_kwargs={"settings": settings.model_dump(), "dry_run": dry_run},
    )
    scaling = AutoscalingConfig(
        min_replicas=settings.min_replicas,
        initial_replicas=min(max(replicas, settings.min_replicas), settings.max_replicas),
        max_replicas=settings.max_replicas,
        upscale_delay_s=settings.up_delay_s,
        downscale_delay_s=settings.down_delay_s,
        look_back_period_s=LOOK_BACK_S,
        policy=policy,
    )
    deployment: Any = serve.deployment(
        AttentionSeat,  # type: ignore[arg-type]
        name=SEATS,
        autoscaling_config=scaling,
        ray_actor_options={"num_cpus": 0, "runtime_env": {"env_vars": {"OMP_NUM_THREADS": "1"}}},
        health_check_period_s=5,
        graceful_shutdown_timeout_s=5,
    )
    return cast(Application, deployment.bind(mesh, namespace, dry_run))


async def _bytes(reference: Any) -> bytes:
    answer: bytes = await reference
    return answer


def _rank() -> int:
    """Of this seat among all; Serve closes the gaps that leaving seats make."""
    context = serve.get_replica_context()
    return int(context.rank.rank)


def _seats() -> int:
    """Seats of this application that are there or coming."""
    context = serve.get_replica_context()
    application = serve.status().applications[context.app_name]
    states = application.deployments[context.deployment].replica_states
    return sum(n for state, n in states.items() if state not in ("STOPPING", "STOPPED"))
