"""Deny by default: with keys configured, nothing but /health and /ready answers without one."""

from typing import Protocol

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from expertmesh.deploy.auth.keys import ApiKey
from expertmesh.deploy.openai.admin import Admin
from expertmesh.deploy.openai.errors import ApiError

# Compared with the path as the router sees it: "/health/" and "//health" are other paths.
OPEN_PATHS = frozenset({"/health", "/ready"})
# What people look at in a browser, which can send a key only as the password of HTTP Basic.
OPERATOR_PATHS = ("/dashboard", "/metrics", "/mesh")


class Authenticator(Protocol):
    """As deploy.front.Front does it."""

    async def authenticate(
        self, authorization: str | None, *, basic: bool = False
    ) -> ApiKey | None: ...


class KeyGuard:
    """Puts the request's ApiKey into `scope["api_key"]`, or answers 401.

    Plain ASGI around the router, so that a path that does not exist needs a key as well. What
    operators look at also accepts the admin token.
    """

    def __init__(self, app: ASGIApp, front: Authenticator, admin: Admin) -> None:
        self._app, self._front, self._admin = app, front, admin

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})
            return
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        path = scope["path"].removeprefix(scope.get("root_path", ""))
        if path in OPEN_PATHS:
            await self._app(scope, receive, send)
            return
        operators = any(path == root or path.startswith(root + "/") for root in OPERATOR_PATHS)
        browsable = operators and scope["method"] in ("GET", "HEAD")
        authorization = Headers(scope=scope).get("authorization")
        if operators and self._admin.borne(authorization):
            await self._app(scope, receive, send)
            return
        try:
            # Never Basic for a POST: browsers add it by themselves to what other pages send.
            scope["api_key"] = await self._front.authenticate(authorization, basic=browsable)
        except ApiError as error:
            response = error.response()
            if browsable:
                response.headers.append("www-authenticate", 'Basic realm="expertmesh"')
            await response(scope, receive, send)
            return
        await self._app(scope, receive, send)
