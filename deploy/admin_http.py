"""How commands talk to a running server: to its /mesh routes, and to what tenants may do."""

import json
import os
import urllib.error
import urllib.request
from collections.abc import Mapping
from typing import Any

from expertmesh.deploy.exit_codes import ExitCode, Refused

TOKEN = "EXPERTMESH_ADMIN_TOKEN"
KEY = "EXPERTMESH_API_KEY"
ANSWER_SECONDS = 60.0
ERROR_BYTES = 10_000
# Codes of wishes that cannot be met, whoever asks. Any other 404 is a server without such a path.
_UNMET = ("session_not_found", "session_quota_exceeded")


def ask(
    url: str, path: str, body: Mapping[str, Any] | None = None, timeout: float = ANSWER_SECONDS,
    *, method: str | None = None, tenant: bool = False, headers: Mapping[str, str] | None = None,
) -> bytes:  # fmt: skip
    """The answer's body. Without a body it is a GET, unless a method is named. tenant: ask with
    the API key, for what belongs to it; else the admin token comes first. Raises Refused in the
    server's own words."""
    sent = {"content-type": "application/json"} | dict(headers or {})
    names = (KEY,) if tenant else (TOKEN, KEY)
    if token := next((t for name in names if (t := os.environ.get(name, "").strip())), ""):
        sent["authorization"] = f"Bearer {token}"
    data = None if body is None else json.dumps(body).encode()
    try:
        return send(url, path, sent, data, timeout, method)
    except urllib.error.HTTPError as error:
        raise _refusal(error.code, error.read(ERROR_BYTES)) from None


def send(
    url: str, path: str, headers: Mapping[str, str], data: bytes | None, timeout: float,
    method: str | None = None,
) -> bytes:  # fmt: skip
    """The answer's body. Raises HTTPError when the server refuses, Refused when none answers."""
    try:
        request = urllib.request.Request(url.rstrip("/") + path, data, dict(headers), method=method)
        # No proxy of the environment: it would be asked for this host's own loopback address.
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        with opener.open(request, timeout=timeout) as response:
            answer: bytes = response.read()
            return answer
    except urllib.error.HTTPError:
        raise
    except ValueError as error:  # not a URL
        raise Refused(ExitCode.USAGE, f"--url {url}: {error}") from None
    except OSError as error:
        reason = getattr(error, "reason", error)
        raise Refused(
            ExitCode.UNREACHABLE, f"no server answers at {url}: {reason}", "check --url"
        ) from None


def ask_json(
    url: str, path: str, body: Mapping[str, Any] | None = None, **more: Any
) -> dict[str, Any]:
    """As `ask`. Raises Refused, also when a stranger answers."""
    try:
        answer = json.loads(ask(url, path, body, **more))
    except ValueError:
        answer = None
    if not isinstance(answer, dict):
        raise Refused(ExitCode.UNREACHABLE, f"{url} does not answer like an ExpertMesh server")
    return answer


def _refusal(status: int, body: bytes) -> Refused:
    """The server's own words, with the option that they are about."""
    try:
        error = json.loads(body)["error"]
        message, field, code = str(error["message"]), error.get("param"), error.get("code")
    except (ValueError, KeyError, TypeError):
        message, field = body[:200].decode("utf-8", "replace") or f"HTTP {status}", None
        code = None
    if status == 400:
        option = f"--{field.removeprefix('x-').replace('_', '-')}: " if field else ""
        return Refused(ExitCode.USAGE, option + message.removeprefix(f"{field}: "))
    if status == 409 or code in _UNMET:
        return Refused(ExitCode.USAGE, message)
    hints = {
        401: f"set {TOKEN} to the server's token, or {KEY} to a key",
        403: f"run it there, or set {TOKEN}",
    }
    return Refused(ExitCode.UNREACHABLE, message, hints.get(status, ""))
