"""What all ways into one server share: HTTP and gRPC are two doors of the same house."""

from collections.abc import Iterator
from contextlib import contextmanager

from expertmesh.deploy.edge_settings import EdgeSettings
from expertmesh.deploy.engine_client import EngineClient
from expertmesh.deploy.openai.errors import ApiError, unavailable
from expertmesh.deploy.openai.served import ServedModel
from expertmesh.deploy.openai.telemetry import Telemetry


class Traffic:
    """What is under way in this process, and so how often one stream may write.

    All streams together get `chunks_per_second`; with few streams a chunk holds one token, with
    many it holds what the engine made since the stream's last turn. A write costs the same
    whatever it carries, and it is writes that exhaust the processor.
    """

    def __init__(self, chunks_per_second: float) -> None:
        self._budget = chunks_per_second
        self.requests = 0
        self.streams = 0

    def interval(self) -> float:
        """Seconds between two chunks of one stream."""
        return self.streams / self._budget

    @contextmanager
    def accepted(self) -> Iterator[None]:
        """One more request under way, from the reading of its body on."""
        self.requests += 1
        try:
            yield
        finally:
            self.requests -= 1


class Front:
    """One served model with everything that its endpoints use. Lives on one event loop.

    draining: set when the server stops: what runs may end, nothing new is taken.
    """

    def __init__(
        self, client: EngineClient, served: ServedModel, edge: EdgeSettings | None = None
    ) -> None:
        """edge: how clients get in; by default everybody who reaches the port does."""
        self.client, self.served = client, served
        self.edge = edge or EdgeSettings()
        self.traffic = Traffic(served.limits.chunks_per_second)
        self.telemetry = Telemetry(
            served.name, lambda: self.traffic.requests, lambda: self.ready()[0]
        )
        self.draining = False

    def ready(self) -> tuple[bool, str]:
        """Whether a request sent now would be served, and if not, why."""
        if self.draining:
            return False, "the server is stopping"
        return self.client.ready()

    def check_open(self) -> None:
        """Raises ApiError 429 or 503 when no further request can be taken."""
        limit = self.served.limits.requests
        if self.traffic.requests >= limit:
            raise ApiError(429, f"{limit} requests are being served already", retry_after=1)
        ready, reason = self.ready()
        if not ready:
            raise unavailable(reason)
