"""What a replica might answer to calls about sessions: it knows every one."""

from typing import Any

import msgspec

from expertmesh.actors.state.session_messages import (
    ResumeReport,
    SessionAnswer,
    SessionCall,
    SessionView,
    SuspendReport,
)


def view(session: str = "s", version: int = 1, **fields: Any) -> SessionView:
    return SessionView(
        session_id=session, status="active", tokens=150, position=149, pages=3, kv_mode="exact",
        seed=7, created=1000.5, used=2000.5, expires=3000.5, version=version, **fields,
    )  # fmt: skip


def answering(call: SessionCall) -> SessionAnswer:
    if call.verb == "list":
        older = msgspec.structs.replace(view("old"), used=1500.0)
        return SessionAnswer(views=[older, view("s")])
    if call.verb == "show":
        return SessionAnswer(view=view(call.session, resident={"hot": 10, "disk": 20}, missing=1))
    if call.verb == "suspend":
        report = SuspendReport(
            session_id=call.session, tokens=150, pages=3, bytes=12_000_000, seconds=0.5
        )
        return SessionAnswer(suspended=report)
    if call.verb == "resume":
        lost = call.session == "lost"
        return SessionAnswer(
            resumed=ResumeReport(
                session_id=call.session,
                restored_tokens=0 if lost else 149,
                recomputed_tokens=149 if lost else 0,
                tier="" if lost else "disk",
                bytes=0 if lost else 12_000_000,
                load_ms=3.25,
                verify_ms=0.5,
                reason="its state could not be read" if lost else "",
            )
        )
    if call.verb == "fork":
        return SessionAnswer(view=view(call.target))
    return SessionAnswer(deleted=call.session)
