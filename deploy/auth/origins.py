"""CORS: which web pages may call this server from a browser."""

from starlette.datastructures import Headers
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import Response
from starlette.types import ASGIApp

from expertmesh.deploy.openai.errors import ApiError

# What scripts may read of an answer besides its body.
EXPOSED = ("X-Request-Id", "Retry-After")


class Origins(CORSMiddleware):
    """Answers preflights, which bear no key, and marks what allowed origins may read.

    Never with credentials: those are what browsers add by themselves, such as cookies, and a key
    in the Authorization header is none of them. Any request header may be sent.
    """

    def __init__(self, app: ASGIApp, origins: tuple[str, ...]) -> None:
        super().__init__(
            app,
            allow_origins=origins,
            allow_methods=("GET", "HEAD", "POST"),
            allow_headers=("*",),
            expose_headers=EXPOSED,
        )

    def preflight_response(self, request_headers: Headers) -> Response:
        """Failures in the one envelope."""
        response = super().preflight_response(request_headers)
        if response.status_code == 200:
            return response
        wrong = bytes(response.body).decode().removeprefix("Disallowed CORS ")
        error = ApiError(403, f"this server does not allow cross-origin requests with this {wrong}")
        return error.response({"vary": response.headers["vary"]})
