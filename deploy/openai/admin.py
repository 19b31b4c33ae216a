"""/mesh: what operators see and change of the mesh behind a front door.

Without a token these routes answer this host alone. Where API keys are needed, any key may look,
and whoever changes something needs a key from this host, or the token. A browser on it must not be
made to ask for somebody else's page, so a request that names a foreign host, comes from another
origin, or was passed on by a proxy is refused as well.
"""

import hmac
import ipaddress
import re
from typing import Annotated, Any, Protocol, TypeVar

import msgspec
import orjson
from pydantic import BeforeValidator, Field, ValidationError
from starlette.requests import Request
from starlette.responses import Response

from expertmesh.cluster.directory import ScaleError
from expertmesh.cluster.ledger.stats import MeshStats
from expertmesh.deploy.engine_client import EngineUnavailable
from expertmesh.deploy.openai.body import read_json
from expertmesh.deploy.openai.errors import ApiError, bad, from_validation, unavailable
from expertmesh.deploy.openai.protocol import Strict

Body = TypeVar("Body", bound=Strict)

BODY_BYTES, BODY_DEPTH = 10_000, 8
_WISH = re.compile(r"[+-]?[0-9]{1,4}")
_FORWARDED = ("forwarded", "x-forwarded-for", "x-real-ip")


class Mesh(Protocol):
    """The control plane, as mesh_client.MeshClient reaches it."""

    async def status(self) -> dict[str, Any]: ...

    async def scale(
        self, experts: int | str | None, attention: int | str | None, dry_run: bool
    ) -> dict[str, Any]: ...

    async def rebalance(self, dry_run: bool) -> dict[str, Any]: ...

    async def routing_report(self) -> dict[str, Any]: ...

    async def routing_overview(self) -> bytes: ...

    async def record_routing(self, seconds: float, tokens: int) -> bytes: ...

    async def stats(self) -> bytes: ...


def _wish(value: Any) -> Any:
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    if isinstance(value, str) and _WISH.fullmatch(value):
        return value if value[0] in "+-" else int(value)
    raise ValueError('must be a number, or a change such as "+1"')


Wish = Annotated[Any, BeforeValidator(_wish)]


class ScaleRequest(Strict):
    """POST /mesh/scale. A number is how many there shall be, a text "+1" how many more."""

    experts: Wish = None
    attention: Wish = None
    dry_run: bool = False


class RebalanceRequest(Strict):
    """POST /mesh/rebalance."""

    dry_run: bool = False


class RecordRequest(Strict):
    """POST /mesh/routing/record: at most so many tokens, for at most so long."""

    seconds: Annotated[float, Field(gt=0, le=600)] = 30.0
    tokens: Annotated[int, Field(ge=1, le=1_000_000)] = 10_000


class Admin:
    """The endpoints. Every failure leaves as an ApiError."""

    def __init__(self, mesh: Mesh | None, token: str | None = None) -> None:
        """mesh: None for a server without one. token: what callers must bear."""
        self._mesh, self._token = mesh, token

    @property
    def mesh(self) -> Mesh | None:
        return self._mesh

    def trusts(self, request: Request) -> bool:
        """Whether whoever asks may see where the mesh's processes run."""
        try:
            self._allowed(request)
        except ApiError:
            return False
        return True

    async def status(self, request: Request) -> Response:
        mesh = self._allowed(request)
        return await self._answer(mesh.status())

    async def scale(self, request: Request) -> Response:
        mesh = self._allowed(request)
        wish = await _parse(ScaleRequest, request)
        if wish.experts is None and wish.attention is None:
            raise bad("give experts, attention or both", "experts")
        return await self._answer(mesh.scale(wish.experts, wish.attention, wish.dry_run))

    async def rebalance(self, request: Request) -> Response:
        mesh = self._allowed(request)
        wish = await _parse(RebalanceRequest, request)
        return await self._answer(mesh.rebalance(wish.dry_run))

    async def routing(self, request: Request) -> Response:
        mesh = self._allowed(request)
        return await self._answer(mesh.routing_report())

    async def record(self, request: Request) -> Response:
        mesh = self._allowed(request)
        wish = await _parse(RecordRequest, request)
        return await self._answer(mesh.record_routing(wish.seconds, wish.tokens))

    async def stats(self) -> MeshStats | None:
        """For /metrics; None without a mesh or when its keeper does not answer in time."""
        if self._mesh is None:
            return None
        try:
            return msgspec.msgpack.decode(await self._mesh.stats(), type=MeshStats)
        except EngineUnavailable:
            return None

    async def _answer(self, work: Any) -> Response:
        try:
            answer = await work
        except ScaleError as error:
            raise bad(error.message, error.field, "invalid_value") from error
        except EngineUnavailable as error:
            raise unavailable(str(error)) from error
        if isinstance(answer, bytes):
            return Response(answer, media_type="application/octet-stream")
        options = orjson.OPT_NON_STR_KEYS | orjson.OPT_SERIALIZE_NUMPY
        return Response(orjson.dumps(answer, option=options), media_type="application/json")

    def borne(self, authorization: str | None) -> bool:
        """Whether the header bears the admin token."""
        scheme, _, given = (authorization or "").partition(" ")
        if self._token is None or scheme.lower() != "bearer":
            return False
        return hmac.compare_digest(given.strip().encode(), self._token.encode())

    def _allowed(self, request: Request) -> Mesh:
        """The mesh, for whoever may manage it. Raises ApiError 401, 403 or 404."""
        has_key = request.scope.get("api_key") is not None
        if has_key and request.method in ("GET", "HEAD"):
            pass
        elif self._token is not None:
            if not self.borne(request.headers.get("authorization")):
                status = 403 if has_key else 401  # it is known who asks, and not enough
                raise ApiError(status, "this needs the admin token as a bearer token")
        elif not _local(request):
            raise ApiError(
                403,
                "without EXPERTMESH_ADMIN_TOKEN, /mesh answers only the host that it runs on",
            )
        if self._mesh is None:
            raise ApiError(404, "this server runs in one process and has no mesh")
        return self._mesh


async def _parse(model: type[Body], request: Request) -> Body:
    body, _ = await read_json(request, BODY_BYTES, BODY_DEPTH, empty_ok=True)
    try:
        return model.model_validate(body)
    except ValidationError as error:
        raise from_validation(error) from None


def _local(request: Request) -> bool:
    headers = request.headers
    if "origin" in headers or any(name in headers for name in _FORWARDED):
        return False
    peer = request.client.host if request.client is not None else ""
    return is_loopback(peer) and is_loopback(request.url.hostname or "")


def is_loopback(host: str) -> bool:
    """Whether an address, or name, can only be reached from this host."""
    if host.lower() == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
