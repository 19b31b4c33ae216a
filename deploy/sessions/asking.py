"""What `expertmesh sessions` asks a server, and how it shows the answer."""

import json
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

from rich.console import Console
from rich.table import Table

from expertmesh.deploy.admin_http import ask_json
from expertmesh.deploy.exit_codes import ExitCode, Refused
from expertmesh.deploy.openai.fields import SESSION_ID, SESSION_ID_RULE

# Saving and loading have deadlines of their own in the server; this is beyond them.
_SECONDS = 180.0


@dataclass(frozen=True, slots=True)
class Wish:
    verb: str
    name: str = ""
    target: str = ""
    salt: str | None = None

    @property
    def path(self) -> str:
        one = f"/v1/sessions/{quote(self.name, safe='')}"
        if self.verb == "list":
            return "/v1/sessions"
        return one if self.verb in ("show", "delete") else f"{one}/{self.verb}"

    @property
    def body(self) -> dict[str, Any] | None:
        if self.verb == "fork":
            return {"session_id": self.target}
        return {} if self.verb in ("suspend", "resume") else None


def ask_about(url: str, wish: Wish, as_json: bool) -> None:
    """Asks and prints. Raises Refused, also when a resume has restored nothing."""
    _check_name("NAME", wish.name, wish.verb != "list")
    _check_name("TARGET", wish.target, wish.verb == "fork")
    answer = ask_json(
        url,
        wish.path,
        wish.body,
        timeout=_SECONDS,
        method="DELETE" if wish.verb == "delete" else None,
        tenant=True,
        headers={} if wish.salt is None else {"x-cache-salt": wish.salt},
    )
    if as_json:
        print(json.dumps(answer))
    else:
        _show(wish, answer)
    if wish.verb == "resume" and not answer["restored_tokens"]:
        raise Refused(ExitCode.FAILED, f"nothing was restored: {answer['reason']}")


def _check_name(argument: str, name: str, needed: bool) -> None:
    if needed and not SESSION_ID.fullmatch(name):
        raise Refused(ExitCode.USAGE, f"{argument} {name!r}: {SESSION_ID_RULE}")


def _show(wish: Wish, answer: Mapping[str, Any]) -> None:
    console = Console()
    if wish.verb == "list":
        console.print(_table(answer["data"]))
    elif wish.verb == "show":
        console.print(_table([answer]))
        for tier, size in answer["resident"].items():
            console.print(f"{tier}: {_size(size)}", highlight=False)
        if answer["missing"]:
            console.print(f"{answer['missing']} parts are nowhere and will be computed again")
    elif wish.verb == "suspend":
        size, seconds = _size(answer["bytes"]), answer["seconds"]
        console.print(
            f"{answer['tokens']} tokens, {size} on disk after {seconds:.2f} s", highlight=False
        )
    elif wish.verb == "resume":
        console.print(
            f"{answer['restored_tokens']} tokens restored, {answer['recomputed_tokens']} to be "
            f"computed again; {_size(answer['bytes'])} from {answer['tier'] or 'nowhere'} in "
            f"{answer['load_ms']:.1f} ms, {answer['verify_ms']:.1f} ms of it verification",
            highlight=False,
        )
    elif wish.verb == "fork":
        console.print(_table([answer]))
    else:
        console.print(f"{answer['id']} is deleted", markup=False, highlight=False)


def _size(count: int) -> str:
    return f"{count / 1e6:.1f} MB" if count < 1e8 else f"{count / 1e9:.2f} GB"


def _table(cards: Any) -> Table:
    table = Table("session", "status", "tokens", "saved", "last used", "expires in")
    now = time.time()
    for card in cards:
        table.add_row(
            card["id"],
            card["status"],
            str(card["tokens"]),
            str(card["saved_tokens"]),
            time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(card["used"])),
            f"{max(0.0, card['expires'] - now) / 3600:.1f} h",
        )
    return table
