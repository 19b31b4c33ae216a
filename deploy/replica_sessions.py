"""Asking the right replica about a session, where there are several.

Each knows what it has served, and what any of them has left on a disk that they share. Whoever has
the newest version of a session is asked to change it.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Protocol, TypeVar

import msgspec

from expertmesh.actors.state.session_messages import (
    Problem,
    SessionAnswer,
    SessionCall,
    SessionView,
)
from expertmesh.deploy.engine_client import SESSION_SECONDS, EngineUnavailable


class SessionHolder(Protocol):
    """What is needed of a ReplicaLink."""

    @property
    def load(self) -> float: ...

    async def session(self, call: SessionCall) -> SessionAnswer:
        """Raises EngineUnavailable."""
        ...


Holder = TypeVar("Holder", bound=SessionHolder)


async def ask_replicas(
    call: SessionCall,
    holders: Sequence[Holder],
    seated: Callable[[str, Holder], None] = lambda session, holder: None,
) -> SessionAnswer:
    """The answer of the mesh. seated: called with a session whose next request belongs to one
    replica. Raises EngineUnavailable when no replica answers, or too few for an answer that is
    true of all."""
    if not holders:
        raise EngineUnavailable("there is no attention replica")
    if call.verb == "list":
        return _merged(await _all(holders, call))
    if call.verb == "delete":
        answers = [answer for _, answer in await _all(holders, call)]
        worst = _worst(answers)
        if worst.problem in (None, "unknown"):
            gone = "it is gone elsewhere, but they may have it" if worst.problem is None else ""
            _all_have_answered(call, len(answers), len(holders), gone)
        return worst
    holder = await _newest(call, holders)
    if holder is None:
        return SessionAnswer(problem="unknown", message=f"there is no session {call.session!r}")
    answer = await within(SESSION_SECONDS, holder.session(call))
    if answer.problem is None and call.verb in ("resume", "fork"):
        seated(call.target if call.verb == "fork" else call.session, holder)
    return answer


async def _newest(call: SessionCall, holders: Sequence[Holder]) -> Holder | None:
    """Who has the newest version; of several the one with least to do, which is the common case
    for what comes from disk."""
    if len(holders) == 1:
        return holders[0]
    look = msgspec.structs.replace(call, verb="show", target="")
    views = [(holder, answer.view) for holder, answer in await _all(holders, look)]
    known = [(view, holder) for holder, view in views if view is not None]
    if not known:
        _all_have_answered(call, len(views), len(holders))
        return None

    def rank(one: tuple[SessionView, Holder]) -> tuple[int, int, float]:
        view, holder = one
        return -view.version, view.missing, holder.load

    return min(known, key=rank)[1]


async def _all(holders: Sequence[Holder], call: SessionCall) -> list[tuple[Holder, SessionAnswer]]:
    """The answers of those that give one. Raises EngineUnavailable when there is none."""
    answers = await asyncio.gather(
        *[within(SESSION_SECONDS, holder.session(call)) for holder in holders],
        return_exceptions=True,
    )
    given = [
        (holder, answer)
        for holder, answer in zip(holders, answers, strict=True)
        if isinstance(answer, SessionAnswer)
    ]
    if not given:
        raise next(answer for answer in answers if isinstance(answer, BaseException))
    return given


def _all_have_answered(call: SessionCall, answers: int, holders: int, known: str = "") -> None:
    """Raises EngineUnavailable unless they have: who is silent may be the one that knows it."""
    if answers < holders:
        known = known or "whether they have it is not known"
        raise EngineUnavailable(
            f"session {call.session!r}: {holders - answers} of {holders} replicas do not answer; "
            f"{known}"
        )


def _worst(answers: Sequence[SessionAnswer]) -> SessionAnswer:
    """Of a deletion: trouble before success, and success before those who never knew it."""
    ranks: dict[Problem | None, int] = {None: 1, "unknown": 2}
    return min(answers, key=lambda answer: ranks.get(answer.problem, 0))


def _merged(answers: Sequence[tuple[Holder, SessionAnswer]]) -> SessionAnswer:
    newest: dict[str, SessionView] = {}
    for _, answer in answers:
        for view in answer.views or []:
            before = newest.get(view.session_id)
            if before is None or before.version < view.version:
                newest[view.session_id] = view
    return SessionAnswer(views=list(newest.values()))


async def within(seconds: float, answer: Awaitable[SessionAnswer]) -> SessionAnswer:
    """Raises EngineUnavailable when it does not come in time."""
    try:
        return await asyncio.wait_for(answer, seconds)
    except TimeoutError:
        raise EngineUnavailable(f"no answer about the session within {seconds:g} s") from None
