"""`expertmesh scale`: asks a running server for another number of actors, and shows the answer."""

import json
from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.table import Table

from expertmesh.deploy.admin_http import ask_json


def scale(
    url: str, experts: str | None, attention: str | None, dry_run: bool, as_json: bool
) -> None:
    """Prints what will be. Without a wish, what there is. Raises Refused."""
    if experts is None and attention is None:
        _show_status(ask_json(url, "/mesh"), as_json)
        return
    wish = {"experts": experts, "attention": attention, "dry_run": dry_run}
    body = {field: value for field, value in wish.items() if value is not None}
    _show_change(ask_json(url, "/mesh/scale", body), as_json)


def _show_change(answer: Mapping[str, Any], as_json: bool) -> None:
    if as_json:
        print(json.dumps(answer))
        return
    table = Table("pool", "from", "to", title="dry run" if answer["dry_run"] else None)
    for pool in ("attention", "experts"):
        table.add_row(pool, str(answer[pool]["from"]), str(answer[pool]["to"]))
    Console().print(table)
    if not answer["dry_run"]:
        print("under way; `expertmesh scale` without a wish shows how far it is")


def _show_status(status: Mapping[str, Any], as_json: bool) -> None:
    if as_json:
        print(json.dumps(status))
        return
    console = Console()
    reason = f": {status['reason']}" if status["reason"] else ""
    console.print(f"{status['state']}{reason}, epoch {status['epoch']}", markup=False)
    table = Table("seat", "actor", "pid", "host", "experts per layer", "")
    for member in [*status["attention"], *status["experts"]]:
        table.add_row(
            member["seat"],
            member["actor"],
            str(member["pid"]),
            member["host"],
            str(member.get("experts_per_layer", "")),
            "leaving" if member["leaving"] else "",
        )
    console.print(table)
    wanted = status["desired"]
    console.print(f"wanted: {wanted['attention']} attention, {wanted['experts']} experts")
