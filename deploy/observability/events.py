"""What has happened to a mesh, in lines for a person: newest last, bounded."""

import time
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

from expertmesh.deploy.mesh_news import news

MOST_EVENTS = 60

Tone = Literal["good", "bad", "warn", "info"]
_TONES: Mapping[str, Tone] = {
    "green": "good", "bold green": "good", "yellow": "warn", "red": "bad", "bold red": "bad",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Entry:
    """t: Unix time at which it was noticed."""

    t: float
    tone: Tone
    text: str


class Events:
    """Compares each status of the mesh (as of GET /mesh) with the one before."""

    def __init__(self) -> None:
        self._status: Mapping[str, Any] | None = None
        self._entries: deque[Entry] = deque(maxlen=MOST_EVENTS)

    def add(self, status: Mapping[str, Any]) -> None:
        before, self._status = self._status, status
        if before is not None:
            now = round(time.time(), 1)
            self._entries.extend(Entry(now, tone, text) for tone, text in _changes(before, status))

    def newest_first(self) -> list[dict[str, Any]]:
        return [asdict(entry) for entry in reversed(self._entries)]


def _changes(before: Mapping[str, Any], after: Mapping[str, Any]) -> Iterator[tuple[Tone, str]]:
    for pool in ("attention", "experts"):
        old, new = before["desired"][pool], after["desired"][pool]
        if new != old:
            yield "info", f"{pool}: {new} wanted, {old} before"
    for style, line in news(before, after):
        yield _TONES.get(style, "info"), line
    if after["epoch"] != before["epoch"]:
        yield "info", f"epoch {after['epoch']} began"
    moved = after["moved_experts"] - before["moved_experts"]
    if after["rebalances"] > before["rebalances"]:
        yield "good", f"rebalanced: {moved} copies of experts moved"
    if after["failed_rebalances"] > before["failed_rebalances"]:
        yield "bad", f"a rebalance was given up: {after['last_rebalance_error']}"
