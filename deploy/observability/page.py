"""/dashboard: one page about this server, live, without anything from elsewhere.

GET /dashboard is the page, GET /dashboard/data what it draws. The page carries its own style and
script, named by their hashes in a Content-Security-Policy that allows nothing else; data reach it
as text only. A sampler keeps the last minutes, and answers are made of what it has: however many
pages are open, engines and keeper are asked once per period.
"""

import asyncio
import hashlib
import logging
from base64 import b64encode
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import msgspec
import orjson
from starlette.requests import Request
from starlette.responses import Response

from expertmesh import __version__
from expertmesh.cluster.ledger.overview import Overview
from expertmesh.cluster.ledger.stats import MeshStats
from expertmesh.deploy.engine_client import EngineUnavailable
from expertmesh.deploy.front import Front
from expertmesh.deploy.observability.events import Events
from expertmesh.deploy.observability.history import COLUMNS, MINUTES, PERIOD_S, History
from expertmesh.deploy.observability.scrape import Reading, Scrape
from expertmesh.deploy.observability.tiers import hot_tier, tiers_of
from expertmesh.deploy.openai.admin import Admin

_log = logging.getLogger(__name__)

# Rows of members and engines that a page is told of; the numbers count all.
MOST_MEMBERS = 128
# How long the first page waits for the first sample; a silent keeper takes longer to give up.
FIRST_S = 3.0
_FOLDER = Path(__file__).parent / "web"
_SCRIPTS = ("basics", "charts", "heat", "members", "page")  # one scope, in this order


class Dashboard:
    """One per app. Samples from the first look on, or from `running` on if that comes first."""

    def __init__(self, front: Front, scrape: Scrape, admin: Admin) -> None:
        self._front, self._scrape, self._admin = front, scrape, admin
        self._history, self._events = History(front), Events()
        self._reading: Reading | None = None
        self._status: dict[str, Any] | None = None
        self._overview: Overview | None = None
        self._sampler: asyncio.Task[None] | None = None
        self._sampled = asyncio.Event()
        self._page, self._policy = assemble()

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """For the app's life."""
        self._start()
        try:
            yield
        finally:
            if self._sampler is not None:
                self._sampler.cancel()
                await asyncio.gather(self._sampler, return_exceptions=True)

    def _start(self) -> None:
        if self._sampler is None or self._sampler.done():
            self._sampler = asyncio.get_running_loop().create_task(self._sample_on())

    async def _sample_on(self) -> None:
        told = ""
        while True:
            try:
                await self._sample()
            except Exception as error:
                # Once per cause: it comes again every period.
                if told != repr(error):
                    told = repr(error)
                    _log.exception("the dashboard's sampler stumbled")
            self._sampled.set()
            await asyncio.sleep(PERIOD_S)

    async def _sample(self) -> None:
        reading = await self._scrape.read()
        self._history.add(reading)
        self._reading = reading
        if self._admin.mesh is None:
            return
        try:
            self._status = await self._admin.mesh.status()
            packed = await self._admin.mesh.routing_overview()
        except EngineUnavailable:
            self._status = None
        else:
            self._events.add(self._status)
            self._overview = msgspec.msgpack.decode(packed, type=Overview)

    # --- endpoints ----------------------------------------------------------------------------

    async def page(self, request: Request) -> Response:
        self._start()
        headers = {
            "content-security-policy": self._policy,
            "x-content-type-options": "nosniff",
            "referrer-policy": "no-referrer",
            "cache-control": "no-cache",
        }
        return Response(self._page, media_type="text/html", headers=headers)

    async def data(self, request: Request) -> Response:
        """since: Unix time of the newest point the page has. heat: version of the heat map it has.
        Both are hints: what is no number counts as none."""
        self._start()
        with suppress(TimeoutError):
            await asyncio.wait_for(self._sampled.wait(), FIRST_S)
        return Response(
            orjson.dumps(
                self._answer(
                    since=_number(request.query_params.get("since")),
                    heat=request.query_params.get("heat", ""),
                    trusted=self._admin.trusts(request),
                )
            ),
            media_type="application/json",
            headers={"cache-control": "no-store"},
        )

    def _answer(self, since: float, heat: str, trusted: bool) -> dict[str, Any]:
        """trusted: may see where processes run and what happened to them."""
        ready, reason = self._front.ready()
        reading = self._reading
        mesh = None if reading is None else reading.mesh
        return {
            "model": self._front.served.name,
            "version": __version__,
            "ready": ready,
            "reason": reason,
            "period": PERIOD_S,
            "minutes": MINUTES,
            "columns": COLUMNS,
            "points": self._history.since(since),
            "engines": self._engines(),
            "has_mesh": self._admin.mesh is not None,
            "mesh": None if mesh is None else self._mesh(mesh),
            "members": self._members(mesh, trusted),
            "events": self._events.newest_first() if trusted else None,
            "heat": self._heat(heat),
        }

    def _engines(self) -> list[dict[str, Any]]:
        """Sequences and tiers of each engine, nothing but its name of one that is down."""
        found: list[dict[str, Any]] = []
        for name, one in list(self._history.engines.items())[:MOST_MEMBERS]:
            if one is None:
                found.append({"name": name, "up": False})
                continue
            found.append(
                {
                    "name": name,
                    "up": one.failed is None,
                    "running": one.running,
                    "waiting": one.waiting,
                    "preemptions": one.preemptions,
                    "hot": [
                        {"kind": kind, "count": count, "of": total}
                        for kind, count, total, _ in hot_tier(one)
                    ],
                    "tiers": tiers_of(one),
                }
            )
        return found

    def _mesh(self, mesh: MeshStats) -> dict[str, Any]:
        overview = self._overview
        return {
            "state": mesh.state,
            "reason": (self._status or {}).get("reason", ""),
            "epoch": mesh.epoch,
            "routing_version": mesh.routing_version,
            "members": mesh.members,
            "desired": mesh.desired,
            "losses": mesh.losses,
            "failovers": mesh.failovers,
            "last_recovery": mesh.last_recovery,
            "rebalances": mesh.rebalances,
            "rebalancing": mesh.rebalancing,
            "moved": mesh.moved_experts,
            "held": mesh.held_requests,
            "balanced": mesh.routing.balancedness_mean,
            "alarms": mesh.routing.alarms_active,
            "fan_out": None if overview is None else overview.fan_out,
        }

    def _members(self, mesh: MeshStats | None, trusted: bool) -> dict[str, list[dict[str, Any]]]:
        """By kind: what the status says of each, with what it does."""
        if self._status is None or mesh is None:
            return {"attention": [], "experts": []}
        load = {actor.seat: actor for actor in mesh.actors}
        found: dict[str, list[dict[str, Any]]] = {}
        for kind in ("attention", "experts"):
            rows = found[kind] = []
            for member in self._status[kind][:MOST_MEMBERS]:
                seat = member["seat"]
                row = {"seat": seat, "leaving": member["leaving"]}
                if trusted:
                    row |= {"pid": member["pid"], "host": member["host"]}
                if seat in load:
                    rows_s, busy = self._history.seats.get(seat, (0.0, 0.0))
                    row |= {"up": load[seat].up, "rows": round(rows_s, 1), "busy": round(busy, 4),
                            "bytes": load[seat].weight_bytes}  # fmt: skip
                rows.append(row)
        return found

    def _heat(self, known: str) -> dict[str, Any] | None:
        """None: nothing is newer than what the page has."""
        overview, status = self._overview, self._status or {}
        if overview is None:
            return None
        version = f"{overview.windows}.{status.get('epoch')}.{status.get('routing_version')}"
        if version == known:
            return None
        plain: dict[str, Any] = msgspec.to_builtins(overview)
        return plain | {"version": version}


def assemble() -> tuple[bytes, str]:
    """The page, and the Content-Security-Policy that allows it to run what it carries."""
    page = (_FOLDER / "dashboard.html").read_text()
    scripts = "\n".join((_FOLDER / f"{name}.js").read_text() for name in _SCRIPTS)
    parts = {
        "css": ("style-src", (_FOLDER / "dashboard.css").read_text()),
        "js": ("script-src", f'"use strict";\n(() => {{\n{scripts}}})();\n'),
    }
    allowed = {}
    for kind, (directive, text) in parts.items():
        digest = b64encode(hashlib.sha256(text.encode()).digest()).decode()
        allowed[directive] = f"'sha256-{digest}'"
        page = page.replace(f"/*{kind}*/", text)
    policy = {
        "default-src": "'none'", **allowed, "connect-src": "'self'", "img-src": "data:",
        "base-uri": "'none'", "form-action": "'none'", "frame-ancestors": "'none'",
    }  # fmt: skip
    return page.encode(), "; ".join(f"{key} {value}" for key, value in policy.items())


def _number(text: str | None) -> float:
    with suppress(TypeError, ValueError):
        return float(text)  # type: ignore[arg-type]
    return 0.0
