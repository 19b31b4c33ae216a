"""What /metrics answers: engines and mesh are read once for all scrapes that come together."""

import asyncio
import time
from collections.abc import Mapping
from dataclasses import dataclass, field

from prometheus_client import CONTENT_TYPE_LATEST
from prometheus_client.openmetrics.exposition import CONTENT_TYPE_LATEST as OPEN_METRICS
from starlette.requests import Request
from starlette.responses import Response

from expertmesh.actors.attention.messages import EngineStats
from expertmesh.cluster.ledger.stats import MeshStats
from expertmesh.deploy.front import Front
from expertmesh.deploy.observability.shared import Shared
from expertmesh.deploy.openai.admin import Admin


@dataclass(frozen=True)
class Reading:
    """Engines by name, None for one that is down; mesh: None without one, or if it is silent.
    texts: expositions made of it, by whether they are OpenMetrics."""

    engines: Mapping[str, EngineStats | None]
    mesh: MeshStats | None
    at: float = field(default_factory=time.monotonic)
    texts: dict[bool, bytes] = field(default_factory=dict)


class Scrape:
    """Replicas and keeper are asked with their own limits (2 s), so no scrape takes much longer
    than two of those, and at any time one question is on its way, however many ask."""

    def __init__(self, front: Front, admin: Admin) -> None:
        self._front, self._admin = front, admin
        self.read = Shared(self._read)
        self._rendering = asyncio.Lock()

    async def _read(self) -> Reading:
        return Reading(*await asyncio.gather(self._front.client.stats(), self._admin.stats()))

    async def metrics(self, request: Request) -> Response:
        """GET /metrics, in the format that the client asks for."""
        open_metrics = "application/openmetrics-text" in request.headers.get("accept", "")
        reading = await self.read()
        async with self._rendering:  # the collectors hold one reading at a time
            text = reading.texts.get(open_metrics)
            if text is None:
                telemetry = self._front.telemetry
                telemetry.look(reading.engines, reading.mesh)
                # Some milliseconds of text: running streams need not wait for it.
                text = await asyncio.to_thread(telemetry.text, open_metrics)
                reading.texts[open_metrics] = text
        kind = OPEN_METRICS if open_metrics else CONTENT_TYPE_LATEST
        return Response(text, headers={"content-type": kind})
