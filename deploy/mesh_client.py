"""A mesh's keeper, as a front door asks it: found by name, and again after it was replaced."""

import asyncio
from typing import Any

import ray
from ray.exceptions import RayActorError, RayError, RayTaskError

from expertmesh.cluster.directory import Directory, ScaleError
from expertmesh.cluster.watch import first_line
from expertmesh.deploy.engine_client import EngineUnavailable

# How long one call for the directory stays open, and how much later its answer may come.
DIRECTORY_SECONDS = 5.0
LATE_SECONDS = 5.0
ANSWER_SECONDS = 10.0
# Reading weights and copying experts is not waited for; planning for many experts is.
PLAN_SECONDS = 60.0
STATS_SECONDS = 2.0


class MeshClient:
    """Methods raise EngineUnavailable when the keeper does not answer."""

    def __init__(self, name: str, namespace: str) -> None:
        """name: of the keeper's Ray actor."""
        self._name, self._namespace = name, namespace
        self._keeper: Any = None

    async def directory(self, seen: int) -> Directory:
        """The directory as soon as it is another than version `seen`, or after some seconds."""
        limit = DIRECTORY_SECONDS + LATE_SECONDS
        answer: Directory = await self._ask(limit, "directory", seen, DIRECTORY_SECONDS)
        return answer

    async def status(self) -> dict[str, Any]:
        answer: dict[str, Any] = await self._ask(ANSWER_SECONDS, "status")
        return answer

    async def scale(
        self, experts: int | str | None, attention: int | str | None, dry_run: bool
    ) -> dict[str, Any]:
        """Numbers, or "+1" and "-1". Raises ScaleError."""
        answer: dict[str, Any] = await self._ask(
            ANSWER_SECONDS, "scale", experts, attention, dry_run
        )
        return answer

    async def rebalance(self, dry_run: bool) -> dict[str, Any]:
        answer: dict[str, Any] = await self._ask(PLAN_SECONDS, "rebalance", dry_run)
        return answer

    async def routing_report(self) -> dict[str, Any]:
        answer: dict[str, Any] = await self._ask(PLAN_SECONDS, "routing_report")
        return answer

    async def routing_overview(self) -> bytes:
        """ledger.overview.Overview as msgpack."""
        answer: bytes = await self._ask(ANSWER_SECONDS, "routing_overview")
        return answer

    async def record_routing(self, seconds: float, tokens: int) -> bytes:
        """An .npz of what whole tokens chose, after at most so many seconds."""
        answer: bytes = await self._ask(seconds + PLAN_SECONDS, "record_routing", seconds, tokens)
        return answer

    async def stats(self) -> bytes:
        """MeshStats as msgpack."""
        answer: bytes = await self._ask(STATS_SECONDS, "mesh_stats")
        return answer

    async def _ask(self, limit_s: float, method: str, *arguments: Any) -> Any:
        try:
            if self._keeper is None:
                self._keeper = await asyncio.to_thread(
                    ray.get_actor, self._name, namespace=self._namespace
                )
            call = getattr(self._keeper, method).remote(*arguments)
            return await asyncio.wait_for(answer_of(call), limit_s)
        except TimeoutError:
            raise EngineUnavailable(
                f"{self._name} does not answer (no {method} within {limit_s:g} s)"
            ) from None
        except RayTaskError as error:
            if isinstance(error.cause, ScaleError | ValueError):
                raise error.cause from None
            raise EngineUnavailable(f"{self._name}: {first_line(error)}") from error
        except (RayError, ValueError) as error:  # ValueError: there is no actor of that name
            if isinstance(error, RayActorError | ValueError):
                self._keeper = None
            raise EngineUnavailable(f"{self._name}: {first_line(error)}") from error


async def answer_of(reference: Any) -> Any:
    """A Ray reference as a coroutine, which asyncio's waits ask for."""
    return await reference
