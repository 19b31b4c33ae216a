"""Ray's cluster token: who has one sends it."""

from collections.abc import MutableMapping
from pathlib import Path


def offer_token(environment: MutableMapping[str, str]) -> None:
    """Before Ray is imported: makes it send the token of this user, if there is one.

    Ray does so by itself only where it finds the cluster by itself; a worker or driver that is
    given an address comes without, and a cluster with a token turns it away. Clusters without one
    do not mind.
    """
    if "RAY_AUTH_MODE" in environment:
        return
    file = environment.get("RAY_AUTH_TOKEN_PATH")
    path = Path(file) if file else Path.home() / ".ray" / "auth_token"
    if environment.get("RAY_AUTH_TOKEN") or path.is_file():
        environment["RAY_AUTH_MODE"] = "token"
