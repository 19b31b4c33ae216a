"""`expertmesh sessions`: saved conversations of a running server. Only typer is imported here."""

from typing import Annotated, Optional

import typer

from expertmesh.deploy.command import LOCAL_URL, URL, run_command

sessions = typer.Typer(
    name="sessions",
    help="Saved conversations: what requests with a session_id have left, in memory and on disk.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)

Url = Annotated[str, URL]
Name = Annotated[str, typer.Argument(help="The session_id of its requests.")]
Salt = Annotated[
    Optional[str],  # noqa: UP045 (typer reads it)
    typer.Option(help="The cache_salt of its requests.", envvar="EXPERTMESH_CACHE_SALT"),
]
Json = Annotated[bool, typer.Option("--json", help="Print the server's answer.")]


@sessions.command("list")
def list_all(url: Url = LOCAL_URL, cache_salt: Salt = None, as_json: Json = False) -> None:
    """The sessions of the API key in EXPERTMESH_API_KEY, the last used first.

    Exit codes of all commands: 0 done, 1 resume has restored nothing, 2 a wish that cannot be met
    (no such session, one of that name already, not a usable name), 8 no answer or no permission.
    """
    _run("list", url, cache_salt, as_json)


@sessions.command()
def show(name: Name, url: Url = LOCAL_URL, cache_salt: Salt = None, as_json: Json = False) -> None:
    """One session, and in which tier its state is."""
    _run("show", url, cache_salt, as_json, name)


@sessions.command()
def suspend(
    name: Name, url: Url = LOCAL_URL, cache_salt: Salt = None, as_json: Json = False
) -> None:
    """Write its whole state to disk, and return when it is there for good."""
    _run("suspend", url, cache_salt, as_json, name)


@sessions.command()
def resume(
    name: Name, url: Url = LOCAL_URL, cache_salt: Salt = None, as_json: Json = False
) -> None:
    """Read its state into memory, verified, before its next request comes."""
    _run("resume", url, cache_salt, as_json, name)


@sessions.command()
def fork(
    name: Name,
    target: Annotated[str, typer.Argument(help="Name of the new session.")],
    url: Url = LOCAL_URL,
    cache_salt: Salt = None,
    as_json: Json = False,
) -> None:
    """A second session that goes on from the same state, which both share."""
    _run("fork", url, cache_salt, as_json, name, target)


@sessions.command()
def delete(
    name: Name, url: Url = LOCAL_URL, cache_salt: Salt = None, as_json: Json = False
) -> None:
    """Forget it, on every replica and on disk."""
    _run("delete", url, cache_salt, as_json, name)


def _run(
    verb: str, url: str, salt: str | None, as_json: bool, name: str = "", target: str = ""
) -> None:
    from expertmesh.deploy.sessions.asking import Wish, ask_about

    run_command(ask_about, url, Wish(verb, name, target, salt), as_json)
