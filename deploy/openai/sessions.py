"""/v1/sessions: named states of conversations, which outlive requests and processes.

A session belongs to its tenant: the API key, and the cache_salt that its requests had, which is the
header X-Cache-Salt here and may be so there. Anybody else's session is one that does not exist.
"""

from typing import Any, TypeVar

import msgspec
import orjson
from pydantic import ValidationError
from starlette.requests import Request
from starlette.responses import Response

from expertmesh.actors.state.session_messages import (
    Problem,
    ResumeReport,
    SessionAnswer,
    SessionCall,
    SessionView,
    SuspendReport,
    Verb,
)
from expertmesh.deploy.front import Front
from expertmesh.deploy.openai.body import read_json
from expertmesh.deploy.openai.errors import QUOTA, ApiError, bad, echo, from_validation
from expertmesh.deploy.openai.fields import SESSION_ID
from expertmesh.deploy.openai.protocol import Strict
from expertmesh.deploy.openai.run import api_error
from expertmesh.deploy.openai.session_answers import ForkRequest, Nothing
from expertmesh.deploy.openai.tenant import header_salt, tenant_of

Body = TypeVar("Body", bound=Strict)

_BODY_BYTES, _BODY_DEPTH = 10_000, 8
_STATUS: dict[Problem, int] = {
    "unknown": 404, "exists": 409, "no_disk": 409, "lost": 409, "busy": 409, "quota": 429,
    "full": 503, "timeout": 503, "failed": 500,
}  # fmt: skip
_CODES: dict[Problem, str] = {
    "unknown": "session_not_found", "exists": "session_exists", "no_disk": "no_state_dir",
    "lost": "session_state_lost", "busy": "session_changed",
    "quota": QUOTA,
}  # fmt: skip
# Of a view: what only show tells, what is for replicas among themselves, what is told as whole
# seconds, and what has another name here.
_DETAILS, _INNER, _TIMES = ("resident", "missing"), ("version",), ("created", "used", "expires")
_NAMES = {"position": "saved_tokens"}


class SessionEndpoints:
    """Every failure leaves as an ApiError."""

    def __init__(self, front: Front) -> None:
        self._front = front

    async def list(self, request: Request) -> Response:
        views = (await self._ask(request, "list")).views or []
        newest = sorted(views, key=lambda view: view.used, reverse=True)
        return _json({"object": "list", "data": [_card(view) for view in newest]})

    async def show(self, request: Request, session_id: str) -> Response:
        view = (await self._ask(request, "show", session_id)).view
        assert view is not None
        return _json(_card(view) | {name: getattr(view, name) for name in _DETAILS})

    async def suspend(self, request: Request, session_id: str) -> Response:
        await _parse(Nothing, request)
        report = (await self._ask(request, "suspend", session_id)).suspended
        assert report is not None
        return _json(_plain(report, "session.suspended"))

    async def resume(self, request: Request, session_id: str) -> Response:
        await _parse(Nothing, request)
        report = (await self._ask(request, "resume", session_id)).resumed
        assert report is not None
        return _json(_plain(report, "session.resumed"))

    async def fork(self, request: Request, session_id: str) -> Response:
        wish = await _parse(ForkRequest, request)
        view = (await self._ask(request, "fork", session_id, wish.session_id)).view
        assert view is not None
        return _json(_card(view))

    async def delete(self, request: Request, session_id: str) -> Response:
        await self._ask(request, "delete", session_id)
        return _json({"id": session_id, "object": "session.deleted", "deleted": True})

    async def _ask(
        self, request: Request, verb: Verb, session: str = "", target: str = ""
    ) -> SessionAnswer:
        for unknown in request.query_params:
            raise bad(f"unknown parameter '{echo(unknown)}'", unknown, "unknown_parameter")
        if session and not SESSION_ID.fullmatch(session):
            raise _unknown(session)
        call = SessionCall(verb=verb, tenant=_tenant(request), session=session, target=target)
        try:
            answer = await self._front.client.session(call)
        except Exception as error:
            known = api_error(error)
            if known is None:
                raise
            raise known from error
        if answer.problem is not None:
            raise _refusal(answer, session)
        return answer


def _tenant(request: Request) -> str:
    return tenant_of(request.scope.get("api_key"), header_salt(request.headers))


def _refusal(answer: SessionAnswer, session: str) -> ApiError:
    problem = answer.problem
    assert problem is not None
    if problem == "unknown":
        return _unknown(session)
    status = _STATUS[problem]
    param = "session_id" if problem in ("exists", "quota") else None
    retry = 1 if status in (429, 503) else None
    return ApiError(status, answer.message, param, _CODES.get(problem), retry)


def _unknown(session: str) -> ApiError:
    """The same words whether it is somebody else's, has expired, or never was."""
    return ApiError(404, f"there is no session '{session[:128]}'", None, "session_not_found")


def _card(view: SessionView) -> dict[str, Any]:
    """Without what only show tells."""
    plain = _plain(view, "session")
    plain |= {name: int(plain[name]) for name in _TIMES}
    return {_NAMES.get(k, k): v for k, v in plain.items() if k not in (*_DETAILS, *_INNER)}


def _plain(told: SessionView | SuspendReport | ResumeReport, kind: str) -> dict[str, Any]:
    """All fields of what a replica tells, as an object of this API."""
    plain: dict[str, Any] = msgspec.to_builtins(told)
    return {"id": plain.pop("session_id"), "object": kind} | plain


def _json(value: Any) -> Response:
    return Response(orjson.dumps(value), media_type="application/json")


async def _parse(model: type[Body], request: Request) -> Body:
    body, _ = await read_json(request, _BODY_BYTES, _BODY_DEPTH, empty_ok=True)
    try:
        return model.model_validate(body)
    except ValidationError as error:
        raise from_validation(error) from None
