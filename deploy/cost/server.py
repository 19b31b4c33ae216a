"""A running server as the ledgers see it: its answers, its counters, its memory."""

import json
import os
import socket
import urllib.error
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal
from urllib.parse import urlsplit

import psutil
from prometheus_client.parser import text_string_to_metric_families

from expertmesh.cluster import metrics
from expertmesh.deploy.admin_http import send
from expertmesh.deploy.exit_codes import ExitCode, Refused

KEY = "EXPERTMESH_API_KEY"
ANSWER_SECONDS = 30.0


def headers() -> dict[str, str]:
    """With the key of the environment, which stays out of the command line."""
    key = os.environ.get(KEY, "").strip()
    return {"authorization": f"Bearer {key}"} if key else {}


def fetch(url: str, path: str) -> bytes:
    """Raises Refused."""
    try:
        return send(url, path, headers(), None, ANSWER_SECONDS)
    except urllib.error.HTTPError as error:
        hint = f"set {KEY} to one of the server's keys" if error.code == 401 else ""
        raise Refused(ExitCode.UNREACHABLE, f"{url}{path}: HTTP {error.code}", hint) from None


def served_model(url: str) -> str:
    """The name of the first model. Raises Refused."""
    try:
        return str(json.loads(fetch(url, "/v1/models"))["data"][0]["id"])
    except (ValueError, KeyError, IndexError, TypeError):
        raise Refused(
            ExitCode.UNREACHABLE, f"{url}/v1/models does not answer like an OpenAI server"
        ) from None


@dataclass(frozen=True, slots=True)
class Counters:
    """Of a server since its start. started: unix time of its front door."""

    started: float
    prompt_tokens: int
    generated_tokens: int
    completed: int
    failed: int
    resident_bytes: int


def counters(url: str) -> Counters:
    """From /metrics. Raises Refused when they are not those of this product."""
    text = fetch(url, "/metrics").decode("utf-8", "replace")
    try:
        sums: dict[str, float] = {}
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                sums[sample.name] = sums.get(sample.name, 0.0) + sample.value
        return Counters(
            started=sums["process_start_time_seconds"],
            prompt_tokens=int(sums[_name(metrics.PROMPT_TOKENS)]),
            generated_tokens=int(sums[_name(metrics.GENERATION_TOKENS)]),
            completed=int(sums[_name(metrics.REQUEST_SUCCESS)]),
            failed=int(sums[_name(metrics.REQUEST_FAILURES)]),
            resident_bytes=int(sums["process_resident_memory_bytes"]),
        )
    except (ValueError, KeyError) as error:
        raise Refused(
            ExitCode.UNREACHABLE,
            f"{url}/metrics does not answer like an ExpertMesh server: {error}",
        ) from None


def _name(metric: metrics.Metric) -> str:
    (exposed,) = metric.exposed
    return exposed


MemoryOf = Literal["processes", "front door"]


def memory(url: str) -> tuple[int, MemoryOf] | None:
    """Resident bytes of the server's processes on this host, added up: whoever listens on its
    port with its children, and the members of its mesh. From elsewhere only the front door tells
    its own. None when nobody does."""
    resident = sum(map(_resident, processes(url)))
    if resident:
        return resident, "processes"
    try:
        return counters(url).resident_bytes, "front door"
    except Refused:
        return None


def processes(url: str) -> set[int]:
    """Ids of those that can be told from here."""
    found: set[int] = set()
    parts = urlsplit(url)
    port = parts.port or (443 if parts.scheme == "https" else 80)
    if _is_here(parts.hostname or ""):
        for pid in _listeners(port):
            found |= {pid, *_children(pid)}
    return found | set(_members(url))


def _is_here(host: str) -> bool:
    own = {entry.address for entries in psutil.net_if_addrs().values() for entry in entries}
    return host in own | {"localhost", socket.gethostname()}


def _listeners(port: int) -> Iterable[int]:
    try:
        return {
            one.pid
            for one in psutil.net_connections("tcp")
            if one.pid and one.status == psutil.CONN_LISTEN and one.laddr.port == port
        }
    except (psutil.Error, OSError):
        return set()


def _children(pid: int) -> Iterable[int]:
    try:
        return {one.pid for one in psutil.Process(pid).children(recursive=True)}
    except psutil.Error:
        return set()


def _members(url: str) -> Iterable[int]:
    """Of the mesh, on this host."""
    try:
        status: Any = json.loads(fetch(url, "/mesh"))
        members = [*status["attention"], *status["experts"]]
        return {int(one["pid"]) for one in members if one["host"] == socket.gethostname()}
    except (Refused, ValueError, KeyError, TypeError):
        return set()  # one process without a mesh, or another product


def _resident(pid: int) -> int:
    try:
        return int(psutil.Process(pid).memory_info().rss)
    except psutil.Error:
        return 0
