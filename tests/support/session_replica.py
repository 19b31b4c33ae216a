"""Sessions of one process over a store of dictionaries, driven by hand."""

import math
from collections.abc import Sequence
from typing import Any

import torch

from expertmesh.actors.state.errands import Errands, Steps
from expertmesh.actors.state.item import Header, Item, Name
from expertmesh.actors.state.keys import root_key
from expertmesh.actors.state.session_messages import SessionAnswer, SessionCall
from expertmesh.actors.state.session_verbs import SessionVerbs
from expertmesh.actors.state.sessions import Sessions
from expertmesh.actors.state.settings import StateSettings
from expertmesh.actors.state.tip import Tip
from tests.support.session_store import LAYOUT, FakeDevice, FakeDisk, FakeStore

FINGERPRINT = b"one model"
CONVERSATION = list(range(1, 151))  # two whole pages and 22 rows


def item(name: Name, position: int, tokens: Sequence[int]) -> Item:
    parts = [torch.full(shape, 7.0).to(dtype) for shape, dtype in LAYOUT.parts(name.kind)]
    header = Header(name.key, name.kind, bytes(32), position, tuple(tokens), "decode",
                    LAYOUT.fingerprint)  # fmt: skip
    return Item(header, tuple(parts))


class Replica:
    """Sessions of one process. Two with the same disk are two replicas, or a restart."""

    def __init__(self, disk: FakeDisk | None, **settings: Any) -> None:
        self.store, self.device, self.now = FakeStore(disk), FakeDevice(), 1000.0
        folder = {} if disk is None else {"disk": "/nowhere", "disk_bytes": 1 << 30}
        self.errands = Errands()
        self.sessions = Sessions(
            self.store, self.device, StateSettings(**folder, **settings), self.errands,
            fingerprint=FINGERPRINT, layout=LAYOUT, clock=lambda: self.now,
        )  # fmt: skip
        self.verbs = SessionVerbs(self.sessions, self.errands)

    def turn(
        self, session: str, tokens: list[int] = CONVERSATION, tenant: str = "a/", seed: int = 3,
        arrived: float = math.inf, saved: bool = True,
    ) -> Tip:  # fmt: skip
        """A request of the session has ended; its last token is not computed. saved: whether the
        session must be this from now on, or as it was."""
        position = len(tokens) - 1
        tip = Tip.of(root_key(FINGERPRINT, tenant), tokens, position, [50])
        items = [item(name, position, ()) for name in tip.names]
        whole = len(tip.keys)
        for page in items[:whole]:
            self.store.put(page)  # the prefix cache writes them through as it goes
        end = items[whole:]
        done = self.sessions.save(tenant, session, "exact", tokens, seed, tip, end, arrived)
        assert done == saved
        return tip

    def ask(self, verb: Any, session: str = "", tenant: str = "a/", target: str = "") -> Any:
        answers: list[SessionAnswer] = []
        call = SessionCall(verb=verb, tenant=tenant, session=session, target=target, at=self.now)
        if verb == "delete":  # as SessionDesk does, whether or not it is known here
            self.sessions.delete(tenant, session, call.at)
        self.verbs.call(call, answers.append)
        (answer,) = answers
        given = [answer.views, answer.view, answer.suspended, answer.resumed, answer.deleted]
        given.append(answer if answer.problem else None)
        (only,) = [one for one in given if one is not None]
        return only

    def claim(
        self, session: str, tokens: list[int], tenant: str = "a/", mode: str = "exact"
    ) -> Any:
        return run(self.sessions.claim(tenant, session, mode, tokens))


def run(steps: Steps[Any]) -> Any:
    results: list[Any] = []
    errands = Errands()
    errands.start(steps, results.append, results.append)
    (result,) = results
    return result
