"""What has happened to a mesh between two looks at its status, in lines for a person."""

from collections.abc import Iterator, Mapping
from typing import Any

Status = Mapping[str, Any]


def news(before: Status, after: Status) -> list[tuple[str, str]]:
    """(style, line) of every change. The statuses are those of GET /mesh."""
    return [*_members(before, after), *_losses(before, after), *_state(before, after)]


def _members(before: Status, after: Status) -> Iterator[tuple[str, str]]:
    old, new = _seats(before), _seats(after)
    for seat, member in new.items():
        if seat not in old:
            yield "green", f"{seat} has joined ({_where(member)})"
        elif member["actor"] != old[seat]["actor"]:
            yield "green", f"{seat} is replaced by {_where(member)}"
        elif member["leaving"] and not old[seat]["leaving"]:
            yield "yellow", f"{seat} is leaving"
    for seat, member in old.items():
        if seat not in new:
            yield "yellow", f"{seat} is gone ({_where(member)})"
    if after["failed_joins"] > before["failed_joins"]:
        yield "red", f"an actor did not come up: {after['last_error']}"


def _losses(before: Status, after: Status) -> Iterator[tuple[str, str]]:
    lost = after["losses"] - before["losses"]
    if lost > 0:
        several = f"{lost} actors, the last one: " if lost > 1 else ""
        yield "red", f"lost {several}{after['last_loss']}"
    if after["failovers"] > before["failovers"] and after["state"] == "ready":
        yield "green", f"running requests went on after {after['last_recovery_seconds']:.1f} s"


def _state(before: Status, after: Status) -> Iterator[tuple[str, str]]:
    if after["state"] == before["state"] and after["reason"] == before["reason"]:
        return
    if after["state"] == "ready":
        yield "bold green", f"ready, epoch {after['epoch']}"
    elif after["state"] == "recovering":
        yield "yellow", f"recovering: {after['reason']}"
    else:
        yield "bold red", f"not serving: {after['reason']}"


def _seats(status: Status) -> dict[str, Any]:
    return {member["seat"]: member for member in [*status["attention"], *status["experts"]]}


def _where(member: Mapping[str, Any]) -> str:
    return f"{member['actor']}, pid {member['pid']} on {member['host']}"
