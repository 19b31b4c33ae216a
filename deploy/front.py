"""What all ways into one server share: HTTP and gRPC are two doors of the same house."""

from collections.abc import Iterator
from contextlib import contextmanager

from expertmesh.deploy.admission.admission import Admission
from expertmesh.deploy.admission.capacity import Capacity
from expertmesh.deploy.auth.keyring import KeyRefused, open_keyring
from expertmesh.deploy.auth.keys import ApiKey
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
    """One served model with everything that its endpoints use. Lives on one event loop."""

    def __init__(
        self, client: EngineClient, served: ServedModel, edge: EdgeSettings | None = None
    ) -> None:
        """edge: how clients get in; by default everybody who reaches the port does.

        Raises KeysError when there are keys and they can not be read.
        """
        self.client, self.served = client, served
        self.edge = edge or EdgeSettings()
        self.traffic = Traffic(served.limits.chunks_per_second)
        self.telemetry = Telemetry(
            served.name, lambda: self.traffic.requests, lambda: self.ready()[0]
        )
        self.keyring = open_keyring(self.edge.auth)
        if (keyring := self.keyring) is not None:
            self.telemetry.watch_keys(lambda: (keyring.usable, float(bool(keyring.failed))))
        queue = self.edge.queue
        self.admission = Admission(queue, Capacity(queue.running, client.stats), self.telemetry)
        self.telemetry.watch_queue(lambda: self.admission.waiting)
        self._draining = False

    @property
    def draining(self) -> bool:
        """Set when the server stops: what runs may end, nothing new is taken."""
        return self._draining

    @property
    def leaving(self) -> bool:
        """Whether clients should go elsewhere from their next request on: the server stops, or
        the drain file announces it."""
        file = self.edge.http.drain_file
        return self._draining or (file is not None and file.exists())

    def drain(self) -> None:
        """From now on `draining`; what waits for a turn is refused. For any thread, and for signal
        handlers."""
        self._draining = True
        self.admission.drain()

    def ready(self) -> tuple[bool, str]:
        """Whether a request sent now would be served, and if not, why."""
        if self.draining:
            return False, "the server is stopping"
        return self.client.ready()

    def check_open(self, key: ApiKey | None = None) -> None:
        """Raises ApiError 429 or 503 when no further request of `key` can be taken."""
        limit = self.served.limits.requests
        if self.traffic.requests >= limit:
            raise ApiError(429, f"{limit} requests are being served already", retry_after=1)
        ready, reason = self.ready()
        if not ready:
            raise unavailable(reason)
        self.admission.check(key)

    async def authenticate(
        self, authorization: str | None, *, basic: bool = False
    ) -> ApiKey | None:
        """Whose request it is, by its Authorization header or metadata. None: no keys are needed.

        basic: the key may also be the password of HTTP Basic. Raises ApiError 401.
        """
        if self.keyring is None:
            return None
        try:
            return await self.keyring.authenticate(authorization, basic=basic)
        except KeyRefused as refused:
            self.telemetry.unauthenticated(refused.reason)
            raise ApiError(401, refused.message) from None
