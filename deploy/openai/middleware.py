"""The outermost layer: request ids, HEAD, the drain, and no failure without an envelope.

Plain ASGI, because Starlette's BaseHTTPMiddleware copies every chunk of a stream through a queue.
"""

import logging
import uuid

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from expertmesh.deploy.front import Front
from expertmesh.deploy.openai.errors import ApiError
from expertmesh.deploy.openai.fields import USABLE_ID

_log = logging.getLogger(__name__)


class Edge:
    """Echoes or mints X-Request-Id, and answers 500 for what nobody caught.

    The id is in `scope["state"]["request_id"]`; an endpoint may put there what the body calls it
    when the header says nothing (`request_id_given` is False).
    """

    def __init__(self, app: ASGIApp, front: Front, tag: bool = True) -> None:
        """tag: False where a proxy in front puts the id in the answer itself."""
        self._app, self._front, self._tag = app, front, tag

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = Headers(scope=scope).get("x-request-id", "")
        usable = USABLE_ID.fullmatch(given) is not None
        state = scope.setdefault("state", {})
        state["request_id"] = given if usable else uuid.uuid4().hex
        state["request_id_given"] = usable
        head = scope["method"] == "HEAD"
        inner = {**scope, "method": "GET"} if head else scope
        started = False

        async def tagged(message: Message) -> None:
            nonlocal started
            if message["type"] == "http.response.start":
                started = True
                headers = MutableHeaders(scope=message)
                if self._tag:
                    headers["x-request-id"] = state["request_id"]
                if self._front.leaving or message["status"] == 408:
                    headers["connection"] = "close"
            elif head:
                message = {**message, "body": b""}
            await send(message)

        try:
            await self._app(inner, receive, tagged)
        except ClientDisconnect:
            return  # nobody is left to answer
        except Exception:
            _log.exception("request %s: %s failed", state["request_id"], scope["path"])
            if not started:
                await ApiError(500, "internal error").response()(inner, receive, tagged)
