"""What can be asked of a replica's sessions: list, show, suspend, resume, fork, delete."""

from collections.abc import Callable
from time import perf_counter

import msgspec

from expertmesh.actors.state.errands import Errands, Steps
from expertmesh.actors.state.item import Kind
from expertmesh.actors.state.manifest import Manifest
from expertmesh.actors.state.pages import pages_for
from expertmesh.actors.state.session_messages import (
    ResumeReport,
    SessionAnswer,
    SessionCall,
    SessionProblem,
    SessionView,
    SuspendReport,
)
from expertmesh.actors.state.sessions import Sessions

# The lowest tier tells how far away the state was.
_DEPTH = ("hot", "host", "disk")


class SessionVerbs:
    """Belongs to the engine's thread, as everything it uses. Answers come by callback, when the
    loads and writes that they need have ended."""

    def __init__(self, sessions: Sessions, errands: Errands) -> None:
        self._sessions, self._errands = sessions, errands

    def call(self, call: SessionCall, answer: Callable[[SessionAnswer], None]) -> None:
        """`answer` is called exactly once, at once or from `errands.poll`."""

        def failed(error: Exception) -> None:
            if not isinstance(error, SessionProblem):
                error = SessionProblem("failed", f"{type(error).__name__}: {error}")
            answer(error.answer())

        self._errands.start(self._steps(call), answer, failed)

    def _steps(self, call: SessionCall) -> Steps[SessionAnswer]:
        if call.verb == "list":
            yield from self._sessions.refresh()
            views = [self._view(one) for one in self._sessions.living(call.tenant)]
            return SessionAnswer(views=views)
        entry = yield from self._sessions.newest(call.tenant, call.session)
        if entry is None:
            raise SessionProblem("unknown", f"there is no session {call.session!r}")
        if call.verb == "show":
            return SessionAnswer(view=self._seen(entry.manifest))
        if call.verb == "suspend":
            return SessionAnswer(suspended=(yield from self._suspend(entry.manifest)))
        if call.verb == "resume":
            return SessionAnswer(resumed=(yield from self._resume(entry.manifest)))
        if call.verb == "fork":
            return SessionAnswer(view=(yield from self._fork(entry.manifest, call.target)))
        yield from self._delete(entry.manifest, call.at)
        return SessionAnswer(deleted=call.session)

    # --- looking ------------------------------------------------------------------------------

    def _view(self, manifest: Manifest) -> SessionView:
        return SessionView(
            session_id=manifest.session,
            status="suspended" if manifest.suspended else "active",
            tokens=manifest.count,
            position=manifest.position,
            pages=pages_for(manifest.position),
            kv_mode=manifest.mode,
            seed=manifest.seed,
            created=manifest.created,
            used=manifest.used,
            expires=self._sessions.expires(manifest),
            version=manifest.version,
        )

    def _seen(self, manifest: Manifest) -> SessionView:
        """With where it is. Looks names up and reads nothing."""
        view, sizes = self._view(manifest), self._sessions.sizes
        for name, tiers in self._sessions.resident(manifest.point().names).items():
            view.missing += not tiers
            for tier in tiers:
                view.resident[tier] = view.resident.get(tier, 0) + sizes[name.kind]
        return view

    # --- suspend and resume -------------------------------------------------------------------

    def _suspend(self, manifest: Manifest) -> Steps[SuspendReport]:
        """Everything of it is on disk, and synced, when this returns."""
        sessions, began = self._sessions, perf_counter()
        if not sessions.durable:
            raise SessionProblem(
                "no_disk",
                "this server keeps no state on disk: it has no --state-dir that it can use",
            )
        names = manifest.point().names
        if not sessions.keep(names):
            sessions.stay_active(manifest)
            yield from self._not_kept(manifest)
        yield from self._commit(sessions.touch(manifest, suspended=True), "it is not suspended")
        return SuspendReport(
            session_id=manifest.session,
            tokens=manifest.count,
            pages=sum(name.kind is Kind.PAGE for name in names),
            bytes=sum(sessions.sizes[name.kind] for name in names),
            seconds=perf_counter() - began,
        )

    def _not_kept(self, manifest: Manifest) -> Steps[None]:
        """Says why: always raises SessionProblem."""
        if not self._sessions.somewhere(manifest.point().names):
            raise SessionProblem(
                "lost", f"the state of session {manifest.session!r} is not in memory any more: its "
                "next request computes it again, and then it can be suspended",
            )  # fmt: skip
        try:
            yield from self._sessions.refused()
        except SessionProblem as problem:
            raise SessionProblem(
                problem.problem, f"{problem.message}: it is not suspended"
            ) from problem

    def _commit(self, manifest: Manifest, otherwise: str) -> Steps[None]:
        """The session is this, here and on the disk, when this returns."""
        self._sessions.enter(manifest)
        try:
            whole = yield from self._sessions.commit(manifest)
        except SessionProblem as problem:
            self._sessions.stay_active(manifest)
            raise SessionProblem(problem.problem, f"{problem.message}: {otherwise}") from problem
        if not whole:
            raise SessionProblem("busy", f"a request of the session has ended: {otherwise}")

    def _resume(self, manifest: Manifest) -> Steps[ResumeReport]:
        """Brings it into memory, verified, and holds it there for the next request."""
        sessions, began = self._sessions, perf_counter()
        resident = sessions.resident(manifest.point().names)
        fetch = sessions.fetch([name for name, tiers in resident.items() if "hot" not in tiers])
        yield fetch
        if not sessions.is_now(manifest):
            fetch.cancel()
            raise SessionProblem("busy", "a request of the session has ended meanwhile")
        report = ResumeReport(
            session_id=manifest.session,
            restored_tokens=0,
            recomputed_tokens=manifest.position,
            tier="",
            bytes=0,
            load_ms=1e3 * (perf_counter() - began),
            verify_ms=1e3 * fetch.verify_seconds,
        )
        if fetch.items is None:
            report.reason = (
                f"its state could not be read ({fetch.reason}): the next request computes it again"
            )
            fetch.cancel()  # from now on its reason is that
            return report
        report.restored_tokens, report.recomputed_tokens = manifest.position, 0
        report.bytes = sum(item.nbytes for item in fetch.items)
        report.tier = max(["hot", *(item.tier for item in fetch.items)], key=_DEPTH.index)
        sessions.settle(sessions.touch(manifest, suspended=False))
        sessions.hold(manifest.tenant, manifest.session, fetch)
        return report

    # --- fork and delete ----------------------------------------------------------------------

    def _fork(self, manifest: Manifest, target: str) -> Steps[SessionView]:
        """A second session in the same state. Its pages are the first one's."""
        sessions = self._sessions
        there = yield from sessions.newest(manifest.tenant, target)
        if there is not None:
            raise SessionProblem("exists", f"there is a session {target!r} already")
        if not sessions.is_now(manifest):  # its state may be gone
            raise SessionProblem("busy", "a request of the session has ended meanwhile")
        if full := sessions.full(manifest.tenant, target):
            raise SessionProblem("quota", full)
        fork = sessions.twin(manifest, target)
        if fork.suspended:
            try:
                yield from self._commit(fork, "there is no fork")
            except SessionProblem:
                if sessions.is_now(fork):
                    sessions.forget(sessions.name(fork.tenant, fork.session))
                raise
        else:
            sessions.settle(fork)
        return self._view(fork)

    def _delete(self, manifest: Manifest, at: float) -> Steps[None]:
        """Gone for everybody: a newer version says so to replicas that have an older one."""
        sessions = self._sessions
        if not sessions.durable:
            sessions.forget(sessions.name(manifest.tenant, manifest.session))
            return
        gone = sessions.touch(manifest, suspended=False)
        gone = msgspec.structs.replace(
            gone, deleted=True, used=at, tokens=b"", keys=b"", tip=b"", position=0, switches=[]
        )
        yield from self._commit(gone, "it may come back when this server starts again")
