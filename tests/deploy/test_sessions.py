"""/v1/sessions and `expertmesh sessions`, over a client that answers as a replica would."""

import asyncio
import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml
from pydantic import BaseModel
from typer.testing import CliRunner

from expertmesh.actors.attention.messages import GenerateRequest, QuotaExceeded
from expertmesh.actors.state.session_messages import (
    Problem,
    ResumeReport,
    SessionAnswer,
    SessionCall,
    SessionView,
    SuspendReport,
)
from expertmesh.deploy import replica_link
from expertmesh.deploy.auth.keys import hash_key
from expertmesh.deploy.cli import app as cli
from expertmesh.deploy.edge_settings import EdgeSettings
from expertmesh.deploy.engine_client import EngineUnavailable
from expertmesh.deploy.front import Front
from expertmesh.deploy.openai import session_answers
from expertmesh.deploy.openai.app import build_app
from expertmesh.deploy.openai.served import ServedModel
from expertmesh.deploy.replica_sessions import ask_replicas
from tests.support.client_scene import Scene, out, request, run, until
from tests.support.door import Door, envelope
from tests.support.fake_client import FakeEngineClient
from tests.support.fake_replica import Method
from tests.support.http_server import http_server
from tests.support.session_answers import answering, view


@pytest.fixture
def sessions(fake: FakeEngineClient, door: Door) -> Door:
    fake.answer = answering
    return door


ROUTES: list[tuple[str, str, Any, type[BaseModel]]] = [
    ("GET", "", None, session_answers.SessionList),
    ("GET", "/s", None, session_answers.SessionDetails),
    ("POST", "/s/suspend", None, session_answers.SessionSuspended),
    ("POST", "/s/resume", {}, session_answers.SessionResumed),
    ("POST", "/s/fork", {"session_id": "t"}, session_answers.SessionCard),
    ("DELETE", "/s", None, session_answers.SessionDeleted),
]
IDS = ["list", "show", "suspend", "resume", "fork", "delete"]


@pytest.mark.parametrize(("method", "path", "body", "model"), ROUTES, ids=IDS)
def test_answers_are_as_described(
    sessions: Door, fake: FakeEngineClient, method: str, path: str, body: Any,
    model: type[BaseModel],
) -> None:  # fmt: skip
    response = sessions.http.request(method, f"/v1/sessions{path}", json=body)
    assert response.status_code == 200, response.text
    model.model_validate(response.json())
    (call,) = fake.calls
    verb = path.rpartition("/")[2] if method == "POST" else call.verb
    assert call.verb == verb and call.session == ("s" if path else "")
    assert call.target == ("t" if verb == "fork" else "") and call.tenant == "/"


def test_what_is_told(sessions: Door) -> None:
    listed = sessions.http.get("/v1/sessions").json()
    assert [card["id"] for card in listed["data"]] == ["s", "old"]  # the last used first
    shown = sessions.http.get("/v1/sessions/s").json()
    assert shown["resident"] == {"hot": 10, "disk": 20} and shown["missing"] == 1
    assert (shown["tokens"], shown["saved_tokens"], shown["seed"]) == (150, 149, 7)
    assert (shown["created"], shown["used"], shown["expires"]) == (1000, 2000, 3000)
    resumed = sessions.http.post("/v1/sessions/lost/resume").json()
    assert resumed["restored_tokens"] == 0 and resumed["recomputed_tokens"] == 149
    assert resumed["reason"] and resumed["tier"] == ""


@pytest.mark.parametrize(
    ("message", "answer", "left_out"),
    [
        (SuspendReport, session_answers.SessionSuspended, set()),
        (ResumeReport, session_answers.SessionResumed, set()),
        (SessionView, session_answers.SessionDetails, {"version"}),
    ],
)
def test_every_field_of_a_message_is_described(
    message: type[msgspec.Struct], answer: type[BaseModel], left_out: set[str]
) -> None:
    """They are told as they are: one that is new must be described too."""
    renamed = {"session_id": "id", "position": "saved_tokens"}
    told = {renamed.get(name, name) for name in message.__struct_fields__} - left_out
    assert answer.model_fields.keys() == told | {"object"}


@pytest.mark.parametrize(
    ("problem", "status", "code"),
    [
        ("unknown", 404, "session_not_found"), ("exists", 409, "session_exists"),
        ("no_disk", 409, "no_state_dir"), ("lost", 409, "session_state_lost"),
        ("quota", 429, "session_quota_exceeded"), ("full", 503, "service_unavailable"),
        ("timeout", 503, "service_unavailable"), ("failed", 500, "internal_error"),
    ],
)  # fmt: skip
def test_each_problem_has_its_status(
    sessions: Door, fake: FakeEngineClient, problem: Problem, status: int, code: str
) -> None:
    fake.answer = lambda call: SessionAnswer(problem=problem, message="what is wrong")
    response = sessions.http.post("/v1/sessions/s/fork", json={"session_id": "t"})
    error = envelope(response, status)
    assert error["code"] == code
    assert error["message"] == ("there is no session 's'" if status == 404 else "what is wrong")
    assert ("retry-after" in response.headers) is (status in (429, 503))


def test_bad_requests_name_what_is_wrong(sessions: Door, fake: FakeEngineClient) -> None:
    post = sessions.http.post
    assert envelope(post("/v1/sessions/s/fork", json={}), 400)["param"] == "session_id"
    for name in ("", "../x", "a b", "x" * 129, ".", 5):
        error = envelope(post("/v1/sessions/s/fork", json={"session_id": name}), 400)
        assert error["param"] == "session_id", name
    error = envelope(post("/v1/sessions/s/resume", json={"tokens": 1}), 400)
    assert error["param"] == "tokens"
    for path in ("%20", "-x", "x" * 129, "a%2Fb", "%00"):
        response = sessions.http.get(f"/v1/sessions/{path}")
        assert envelope(response, 404)["type"] == "not_found_error", path
    for salt in ("", "x" * 257):
        response = sessions.http.get("/v1/sessions", headers={"x-cache-salt": salt})
        assert envelope(response, 400)["param"] == "x-cache-salt"
    for path in ("?limit=5", "/s?limit=5"):
        error = envelope(sessions.http.get(f"/v1/sessions{path}"), 400)
        assert (error["param"], error["code"]) == ("limit", "unknown_parameter")
    assert not fake.calls
    assert sessions.http.put("/v1/sessions/s").status_code == 405
    fake.down = "the mesh is starting"
    assert "starting" in envelope(sessions.http.get("/v1/sessions"), 503)["message"]


def test_requests_and_routes_of_one_client_are_one_tenant(
    served: ServedModel, tmp_path: Path, fake: FakeEngineClient, door: Door
) -> None:
    door.complete([1, 2], session_id="s", cache_salt="pepper", max_tokens=1)
    (request,) = fake.requests
    door.http.get("/v1/sessions/s", headers={"x-cache-salt": "pepper"})
    assert fake.calls[0].tenant == request.tenant == "/pepper" and request.session == "s"
    keys = tmp_path / "keys.yaml"
    names = ("ann", "bob")
    keys.write_text(yaml.safe_dump({"keys": [{"name": n, "hash": hash_key(n)} for n in names]}))
    client = FakeEngineClient()
    edge = EdgeSettings.model_validate({"auth": {"keys_file": str(keys)}})
    with http_server(build_app(Front(client, served, edge))) as url, Door(url) as closed:
        assert closed.http.get("/v1/sessions").status_code == 401
        for name in names:
            headers = {"authorization": f"Bearer {name}"}
            closed.http.get("/v1/sessions", headers=headers)
            body = {"model": "tiny", "prompt": [1], "max_tokens": 1, "session_id": "s"}
            closed.http.post("/v1/completions", json=body, headers=headers)
            closed.http.get("/v1/sessions", headers=headers | {"x-cache-salt": "/x"})
    assert [call.tenant for call in client.calls] == ["ann/", "ann//x", "bob/", "bob//x"]
    assert [one.tenant for one in client.requests] == ["ann/", "bob/"]


def test_a_quota_is_the_same_for_a_fork_and_a_request(
    sessions: Door, fake: FakeEngineClient
) -> None:
    fake.answer = lambda call: SessionAnswer(problem="quota", message="there are 3 already")
    fake.refuse = QuotaExceeded("there are 3 already", "session_id")
    fork = sessions.http.post("/v1/sessions/s/fork", json={"session_id": "t"})
    request = sessions.post("/v1/completions", prompt="x", session_id="t")
    for response in (fork, request):
        error = envelope(response, 429)
        assert error["code"] == "session_quota_exceeded" and error["param"] == "session_id"
        assert error["message"] == "there are 3 already" and response.headers["retry-after"] == "1"


class TestCommand:
    def run(self, door: Door, *arguments: str, code: int = 0, **environment: str) -> str:
        env = {"EXPERTMESH_URL": door.url, "COLUMNS": "200"} | environment
        result = CliRunner().invoke(cli, ["sessions", *arguments], env=env)
        assert result.exit_code == code, result.output
        return result.output

    def test_each_verb(self, sessions: Door, fake: FakeEngineClient) -> None:
        listed = self.run(sessions, "list")
        assert all(word in listed for word in ("old", "active", "150", "149"))
        shown = self.run(sessions, "show", "s")
        assert "hot: 0.0 MB" in shown and "1 parts are nowhere" in shown
        assert "12.0 MB on disk after 0.50 s" in self.run(sessions, "suspend", "s")
        assert "149 tokens restored, 0 to be" in self.run(sessions, "resume", "s")
        assert "t" in self.run(sessions, "fork", "s", "t")
        assert "s is deleted" in self.run(sessions, "delete", "s", "--cache-salt", "pepper")
        assert [call.verb for call in fake.calls] == IDS
        assert [call.tenant for call in fake.calls] == ["/"] * 5 + ["/pepper"]
        assert fake.calls[4].target == "t"

    def test_a_resume_of_nothing_is_no_success(self, sessions: Door) -> None:
        output = self.run(sessions, "resume", "lost", code=1)
        assert "nothing was restored: its state could not be read" in output

    def test_the_servers_own_words(self, door: Door) -> None:
        assert "error: there is no session 's'" in self.run(door, "suspend", "s", code=2)
        assert json.loads(self.run(door, "list", "--json")) == {"object": "list", "data": []}

    @pytest.mark.parametrize(
        ("arguments", "argument"),
        [
            (["show", ""], "NAME ''"), (["show", "a/../b c"], "NAME 'a/../b c'"),
            (["fork", "priv", "a/b"], "TARGET 'a/b'"), (["fork", "priv", ""], "TARGET ''"),
        ],
        ids=["empty", "path", "target", "empty target"],
    )  # fmt: skip
    def test_names_are_checked_before_anybody_is_asked(
        self, sessions: Door, fake: FakeEngineClient, arguments: list[str], argument: str
    ) -> None:
        output = self.run(sessions, *arguments, code=2)
        assert f"error: {argument}: must be 1 to 128 letters" in output and not fake.calls
        assert "--cache-salt: " in self.run(sessions, "list", "--cache-salt", "x" * 257, code=2)

    @pytest.mark.parametrize(
        ("problem", "code"),
        [
            ("unknown", 2), ("exists", 2), ("quota", 2), ("no_disk", 2), ("lost", 2), ("busy", 2),
            ("full", 8), ("timeout", 8), ("failed", 8),
        ],
    )  # fmt: skip
    def test_a_wish_that_cannot_be_met_is_no_missing_server(
        self, sessions: Door, fake: FakeEngineClient, problem: Problem, code: int
    ) -> None:
        fake.answer = lambda call: SessionAnswer(problem=problem, message="what is wrong")
        self.run(sessions, "fork", "s", "t", code=code)

    def test_it_asks_with_the_key_not_with_the_operators_token(self, door: Door) -> None:
        from expertmesh.deploy import admin_http

        sent: list[Any] = []
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(admin_http, "send", lambda *arguments: sent.append(arguments) or b"{}")
            for verb in ("suspend", "delete"):
                CliRunner().invoke(
                    cli, ["sessions", verb, "s"],
                    env={"EXPERTMESH_API_KEY": "mine", "EXPERTMESH_ADMIN_TOKEN": "not this"},
                )  # fmt: skip
        assert [arguments[2]["authorization"] for arguments in sent] == ["Bearer mine"] * 2
        assert [arguments[5] for arguments in sent] == [None, "DELETE"]


class Holder:
    """A replica that knows some sessions, or does not answer."""

    def __init__(self, load: float = 0.0, silent: bool = False, **versions: int) -> None:
        self.load, self.silent, self.versions = load, silent, versions
        self.problem: Problem | None = None
        self.asked: list[str] = []

    async def session(self, call: SessionCall) -> SessionAnswer:
        self.asked.append(call.verb)
        if self.silent:
            raise EngineUnavailable("r1: it does not answer")
        if call.verb == "list":
            return SessionAnswer(views=[view(*one) for one in self.versions.items()])
        if call.session not in self.versions:
            return SessionAnswer(problem="unknown", message="unknown here")
        if self.problem is not None:
            return SessionAnswer(problem=self.problem, message="trouble")
        if call.verb == "show":
            return SessionAnswer(view=view(call.session, self.versions[call.session]))
        return answering(call)


def ask(verb: Any, *holders: Holder, session: str = "s") -> tuple[SessionAnswer, list[Any]]:
    seated: list[Any] = []
    call = SessionCall(verb=verb, tenant="/", session=session, target="t")
    answer = asyncio.run(
        ask_replicas(call, holders, lambda name, holder: seated.append((name, holder)))
    )
    return answer, seated


class TestReplicas:
    def test_whoever_has_the_newest_is_asked(self) -> None:
        old, new, other = Holder(s=1), Holder(load=9, s=2), Holder(u=5)
        answer, seated = ask("resume", old, new, other)
        assert answer.resumed is not None and seated == [("s", new)]
        assert (old.asked, new.asked, other.asked) == (["show"], ["show", "resume"], ["show"])
        assert ask("fork", old, new)[1] == [("t", new)]
        assert ask("suspend", old, new)[1] == []

    def test_of_equals_the_idle_one(self) -> None:
        busy, idle = Holder(load=3, s=1), Holder(load=1, s=1)
        assert ask("resume", busy, idle)[1] == [("s", idle)]

    def test_lists_are_one_list(self) -> None:
        answer, _ = ask("list", Holder(s=1, u=4), Holder(s=3), Holder(silent=True))
        assert answer.views is not None
        assert {one.session_id: one.version for one in answer.views} == {"s": 3, "u": 4}

    def test_all_of_them_delete(self) -> None:
        one, two, three = Holder(s=1), Holder(s=2), Holder()
        assert ask("delete", three, one, two)[0].deleted == "s"
        assert one.asked == two.asked == three.asked == ["delete"]
        assert ask("delete", three)[0].problem == "unknown"
        two.problem = "timeout"
        assert ask("delete", one, two, three)[0].problem == "timeout"

    def test_nobody_knows_it_or_nobody_answers(self) -> None:
        for holders in ((), (Holder(silent=True),), (Holder(silent=True), Holder(silent=True))):
            with pytest.raises(EngineUnavailable):
                ask("suspend", *holders)

    def test_who_is_silent_may_be_the_one_that_knows_it(self) -> None:
        for verb in ("show", "suspend", "resume", "fork", "delete"):
            with pytest.raises(EngineUnavailable, match="1 of 2 replicas do not answer; whether"):
                ask(verb, Holder(), Holder(silent=True))
        with pytest.raises(EngineUnavailable, match="it is gone elsewhere, but they may have it"):
            ask("delete", Holder(s=1), Holder(silent=True))
        assert ask("suspend", Holder(s=1), Holder(silent=True))[0].suspended is not None


class TestClient:
    """The client over attention actors, which are plain objects here."""

    @pytest.fixture(autouse=True)
    def quick(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(replica_link, "LOOK_SECONDS", 0.02)

    def test_a_resumed_session_is_asked_for_where_it_is(self) -> None:
        async def scenario(scene: Scene) -> None:
            asked: list[int] = []

            def replica(number: int, version: int) -> Any:
                async def session(call: bytes) -> bytes:
                    wish = msgspec.msgpack.decode(call, type=SessionCall)
                    await scene.replicas[number].pause()
                    asked.append(number)
                    answer = answering(wish)
                    if wish.verb == "show":
                        answer = SessionAnswer(view=view(wish.session, version))
                    return msgspec.msgpack.encode(answer)

                return Method(session)

            for number, one in enumerate(scene.replicas):
                one.session = replica(number, version=number)
            call = SessionCall(verb="resume", tenant="a/", session="s")
            answer = await scene.client.session(call)
            assert answer.resumed is not None and answer.resumed.restored_tokens == 149
            assert sorted(asked[:2]) == [0, 1] and asked[2:] == [
                1
            ]  # both are asked, the newest does
            wish = msgspec.structs.replace(request("q"), tenant="a/", session="s")
            task = asyncio.create_task(anext(aiter(scene.client.generate(wish))))
            await until(lambda: scene.owner("q") is not None)
            assert scene.owner("q") is scene.replicas[1]
            scene.replicas[1].say(out("q", 1, finish="stop"))
            assert (await task).token_ids == [1]
            # One that has died is not needed where another knows it, but has deleted nothing.
            scene.replicas[1].dead.set()
            view_of = SessionCall(verb="show", tenant="a/", session="s")
            assert (await scene.client.session(view_of)).view is not None
            await until(lambda: "down" in scene.links().values())
            with pytest.raises(EngineUnavailable, match="1 of 2 replicas do not answer"):
                await scene.client.session(msgspec.structs.replace(view_of, verb="delete"))
            # Without any there is no answer.
            scene.replicas[0].dead.set()
            await until(lambda: set(scene.links().values()) == {"down"})
            with pytest.raises(EngineUnavailable):
                await scene.client.session(view_of)

        run(scenario)

    def test_a_turn_that_moves_does_not_bring_back_what_was_deleted(self) -> None:
        """Its heir may be so new that nobody has told it."""

        async def session(call: bytes) -> bytes:
            wish = msgspec.msgpack.decode(call, type=SessionCall)
            return msgspec.msgpack.encode(SessionAnswer(deleted=wish.session))

        async def scenario(scene: Scene) -> None:
            for one in scene.replicas:
                one.session = Method(session)
            for name, tenant in (("a", "a/"), ("b", "b/")):
                wish = msgspec.structs.replace(request(name), tenant=tenant, session="s")
                tasks.append(asyncio.create_task(answer_to(scene, wish)))
                await until(lambda name=name: scene.owner(name) is not None)  # type: ignore[misc]
            answer = await scene.client.session(
                SessionCall(verb="delete", tenant="a/", session="s")
            )
            assert answer.deleted == "s" and scene.attempt("a").session == "s"
            for name, kept in (("a", ""), ("b", "s")):
                scene.owner(name).say(out(name, finish="abort"))  # type: ignore[union-attr]
                heir = f"{name}~1"
                await until(lambda heir=heir: scene.owner(heir) is not None)  # type: ignore[misc]
                assert scene.attempt(heir).session == kept
                scene.owner(heir).say(out(heir, 1, finish="stop"))  # type: ignore[union-attr]
            assert await asyncio.gather(*tasks) == [[1], [1]]

        async def answer_to(scene: Scene, wish: GenerateRequest) -> list[int]:
            return [one async for out in scene.client.generate(wish) for one in out.token_ids]

        tasks: list[asyncio.Task[list[int]]] = []
        run(scenario)

    def test_replicas_that_leave_delete_as_well(self) -> None:
        """A turn may end where it is, and would save the session there."""

        async def scenario(scene: Scene) -> None:
            told: list[tuple[int, str]] = []
            scene.client._drain_s = 20.0

            def replica(number: int) -> Any:
                async def session(call: bytes) -> bytes:
                    wish = msgspec.msgpack.decode(call, type=SessionCall)
                    told.append((number, wish.verb))
                    shown = SessionAnswer(view=view("s", 1))
                    return msgspec.msgpack.encode(shown if wish.verb == "show" else answering(wish))

                return Method(session)

            for number, one in enumerate(scene.replicas):
                one.session = replica(number)
            (task,) = await scene.ask("q")
            leaver = scene.owner("q")
            assert leaver is not None
            names = {each: name for name, each in scene.mesh.replicas.items()}
            number = scene.replicas.index(leaver)
            del scene.mesh.replicas[names[leaver]]
            scene.mesh.publish()
            await until(lambda: len(scene.links()) == 1)
            for verb in ("show", "delete"):
                await scene.client.session(SessionCall(verb=verb, tenant="a/", session="s"))
            assert sorted(told) == sorted(
                [(1 - number, "show"), (1 - number, "delete"), (number, "delete")]
            )
            leaver.say(out("q", 1, finish="stop"))
            assert await task == [1]

        run(scenario)
