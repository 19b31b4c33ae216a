"""How commands talk to the /mesh routes of a running server."""

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


def ask(
    url: str, path: str, body: Mapping[str, Any] | None = None, timeout: float = ANSWER_SECONDS
) -> bytes:
    """The answer's body. Without a body it is a GET. Raises Refused in the server's own words."""
    headers = {"content-type": "application/json"}
    if token := os.environ.get(TOKEN, "").strip() or os.environ.get(KEY, "").strip():
        headers["authorization"] = f"Bearer {token}"
    data = None if body is None else json.dumps(body).encode()
    try:
        return send(url, path, headers, data, timeout)
    except urllib.error.HTTPError as error:
        raise _refusal(error.code, error.read(ERROR_BYTES)) from None


def send(
    url: str, path: str, headers: Mapping[str, str], data: bytes | None, timeout: float
) -> bytes:
    """The answer's body. Raises HTTPError when the server refuses, Refused when none answers."""
    try:
        request = urllib.request.Request(url.rstrip("/") + path, data, dict(headers))
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


def ask_json(url: str, path: str, body: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Raises Refused, also when a stranger answers."""
    try:
        answer = json.loads(ask(url, path, body))
    except ValueError:
        answer = None
    if not isinstance(answer, dict):
        raise Refused(ExitCode.UNREACHABLE, f"{url} does not answer like an ExpertMesh server")
    return answer


def _refusal(status: int, body: bytes) -> Refused:
    """The server's own words, with the option that they are about."""
    try:
        error = json.loads(body)["error"]
        message, field = str(error["message"]), error.get("param")
    except (ValueError, KeyError, TypeError):
        message, field = body[:200].decode("utf-8", "replace") or f"HTTP {status}", None
    if status == 400:
        option = f"--{field}: " if field else ""
        return Refused(ExitCode.USAGE, option + message.removeprefix(f"{field}: "))
    hints = {
        401: f"set {TOKEN} to the server's token, or {KEY} to a key",
        403: f"run it there, or set {TOKEN}",
    }
    return Refused(ExitCode.UNREACHABLE, message, hints.get(status, ""))
