"""The outermost layer: request ids, and no failure without an envelope. Plain ASGI, because
Starlette's BaseHTTPMiddleware copies every chunk of a stream through a queue."""

import logging
import uuid

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from expertmesh.deploy.openai.errors import ApiError
from expertmesh.deploy.openai.fields import USABLE_ID

_log = logging.getLogger(__name__)


class Edge:
    """Echoes or mints X-Request-Id, and answers 500 for what nobody caught."""

    def __init__(self, app: ASGIApp, tag: bool = True) -> None:
        """tag: False where a proxy in front puts the id in the answer itself."""
        self._app = app
        self._tag = tag

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = Headers(scope=scope).get("x-request-id", "")
        request_id = given if USABLE_ID.fullmatch(given) else uuid.uuid4().hex
        started = False

        async def tagged(message: Message) -> None:
            nonlocal started
            if message["type"] == "http.response.start":
                started = True
                if self._tag:
                    MutableHeaders(scope=message)["x-request-id"] = request_id
            await send(message)

        try:
            await self._app(scope, receive, tagged)
        except ClientDisconnect:
            return  # nobody is left to answer
        except Exception:
            _log.exception("request %s: %s failed", request_id, scope["path"])
            if not started:
                await ApiError(500, "internal error").response()(scope, receive, tagged)
