"""The OpenAI-compatible application: routes over an EngineClient, and nothing that computes."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from typing import Any, TypeVar

import orjson
from fastapi import FastAPI, Request
from prometheus_client import CONTENT_TYPE_LATEST
from pydantic import BaseModel, ValidationError
from starlette.exceptions import HTTPException
from starlette.responses import Response

from expertmesh import __version__
from expertmesh.actors.model.tokenizer import Tokenizer
from expertmesh.deploy.auth.guard import KeyGuard
from expertmesh.deploy.auth.keys import ApiKey
from expertmesh.deploy.auth.origins import Origins
from expertmesh.deploy.front import Front
from expertmesh.deploy.observability.page import Dashboard
from expertmesh.deploy.observability.scrape import Scrape
from expertmesh.deploy.openai import answers, chat, completions, constraints, session_answers
from expertmesh.deploy.openai.admin import Admin, RebalanceRequest, RecordRequest, ScaleRequest
from expertmesh.deploy.openai.body import read_json
from expertmesh.deploy.openai.errors import ApiError, bad, from_validation, unavailable, unsupported
from expertmesh.deploy.openai.generation import Generation
from expertmesh.deploy.openai.middleware import Edge
from expertmesh.deploy.openai.openapi import BODY, GENERATION, Described
from expertmesh.deploy.openai.protocol import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    SamplingRequest,
    Strict,
    TokenizeRequest,
)
from expertmesh.deploy.openai.response import GenerationResponse
from expertmesh.deploy.openai.sampling import check_ids, check_model
from expertmesh.deploy.openai.sessions import SessionEndpoints
from expertmesh.deploy.openai.tenant import salt_body

Model = TypeVar("Model", bound=Strict)
Tokenizing = TypeVar("Tokenizing", TokenizeRequest, DetokenizeRequest)
# A checked request as its generation, and whether the edge may end it early (stop strings).
Prepare = Callable[[dict[str, Any], ApiKey | None], tuple[Generation, bool]]
Lifespan = Callable[[FastAPI], AbstractAsyncContextManager[None]]


def build_app(
    front: Front,
    *,
    admin: Admin | None = None,
    lifespan: Lifespan | None = None,
    behind_proxy: bool = False,
) -> FastAPI:
    """Routes for one served model. Two apps over two fronts share nothing.

    admin: the mesh behind the client, if there is one.
    lifespan: what must live as long as the app, on its event loop (a client's connections).
    behind_proxy: Serve's proxy answers with X-Request-Id itself.
    """
    admin = admin or Admin(None)
    scrape = Scrape(front, admin)
    dashboard = Dashboard(front, scrape, admin)
    app = FastAPI(
        title="ExpertMesh",
        version=__version__,
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,  # clients do not follow a 307 of a POST; a 404 says what is wrong
        lifespan=_watched(lifespan, dashboard),
    )
    door = Endpoints(front)
    # The last one added is the outermost. Origins outside of Edge, so that browsers may read also
    # what it answers itself; keys inside of it, so that a 401 has a request id.
    if front.keyring is not None:
        app.add_middleware(KeyGuard, front=front, admin=admin)
    app.add_middleware(Edge, front=front, tag=not behind_proxy)
    if front.edge.http.cors_origins:
        app.add_middleware(Origins, origins=front.edge.http.cors_origins)
    app.add_exception_handler(ApiError, _on_api_error)
    app.add_exception_handler(HTTPException, _on_http_error)

    described = Described()

    def get(path: str, endpoint: Any, answer: type[BaseModel] | None, **more: Any) -> None:
        extra = described.operation(answer, **more)
        app.get(path, openapi_extra=extra, response_model=None, response_class=Response)(endpoint)

    def post(
        path: str, endpoint: Any, body: type[Strict], answer: type[BaseModel] | None, **more: Any
    ) -> None:
        extra = described.operation(answer, body=body, **more)
        app.post(path, openapi_extra=extra, response_model=None, response_class=Response)(endpoint)

    post(
        "/v1/completions", door.completions, CompletionRequest, answers.CompletionAnswer,
        chunk=answers.CompletionChunk, errors=GENERATION, salted=True,
    )  # fmt: skip
    post(
        "/v1/chat/completions", door.chat, ChatRequest, answers.ChatAnswer,
        chunk=answers.ChatChunk, errors=GENERATION, salted=True,
    )  # fmt: skip
    tokenizing = (*BODY, 404)
    post("/tokenize", door.tokenize, TokenizeRequest, answers.Tokens, errors=tokenizing)
    post("/detokenize", door.detokenize, DetokenizeRequest, answers.Text, errors=tokenizing)
    get("/v1/models", door.models, answers.ModelList)
    get("/v1/models/{model_id:path}", door.model, answers.ModelCard, errors=(404,))
    get("/health", door.health, None)
    get("/ready", door.ready, answers.Ready)
    get("/load", door.load, answers.Load)
    get("/version", door.version, answers.Version)
    get("/metrics", scrape.metrics, None, media_type=CONTENT_TYPE_LATEST)
    get("/dashboard", dashboard.page, None, media_type="text/html")
    get("/dashboard/data", dashboard.data, answers.DashboardData)
    get("/mesh", admin.status, answers.Mesh, errors=(404,))
    get("/mesh/routing", admin.routing, answers.Mesh, errors=(404,))
    managing = (*BODY, 404)
    post("/mesh/scale", admin.scale, ScaleRequest, answers.Mesh, errors=managing)
    post("/mesh/rebalance", admin.rebalance, RebalanceRequest, answers.Mesh, errors=managing)
    post(
        "/mesh/routing/record", admin.record, RecordRequest, None,
        media_type="application/octet-stream", errors=managing,
    )  # fmt: skip
    _add_sessions(app, described, SessionEndpoints(front))
    described.install(app)
    return app


def _add_sessions(app: FastAPI, described: Described, door: SessionEndpoints) -> None:
    one = "/v1/sessions/{session_id}"
    routes: list[tuple[str, str, Any, type[BaseModel], type[Strict] | None]] = [
        ("GET", "/v1/sessions", door.list, session_answers.SessionList, None),
        ("GET", one, door.show, session_answers.SessionDetails, None),
        ("DELETE", one, door.delete, session_answers.SessionDeleted, None),
        ("POST", f"{one}/suspend", door.suspend, session_answers.SessionSuspended,
         session_answers.Nothing),
        ("POST", f"{one}/resume", door.resume, session_answers.SessionResumed,
         session_answers.Nothing),
        ("POST", f"{one}/fork", door.fork, session_answers.SessionCard,
         session_answers.ForkRequest),
    ]  # fmt: skip
    for method, path, endpoint, answer, body in routes:
        errors = (404, 409, 429, *(BODY if body else (400,)))
        extra = described.operation(answer, body=body, errors=errors, salted=True)
        app.add_api_route(
            path, endpoint, methods=[method], openapi_extra=extra, response_model=None,
            response_class=Response,
        )  # fmt: skip


def _watched(lifespan: Lifespan | None, dashboard: Dashboard) -> Lifespan:
    """The dashboard samples for as long as the app lives, whatever else does."""

    @asynccontextmanager
    async def both(app: FastAPI) -> AsyncIterator[None]:
        async with AsyncExitStack() as stack:
            if lifespan is not None:
                await stack.enter_async_context(lifespan(app))
            await stack.enter_async_context(dashboard.running())
            yield

    return both


async def _on_api_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return error.response()


async def _on_http_error(request: Request, error: Exception) -> Response:
    """Starlette's own 404 and 405, in the one envelope."""
    assert isinstance(error, HTTPException)
    path = request.url.path[:100]
    if error.status_code == 404:
        return ApiError(404, f"there is no {path} here").response()
    if error.status_code == 405:
        allowed = error.headers or {}
        return ApiError(405, f"{request.method} is not allowed on {path}").response(allowed)
    return ApiError(error.status_code, str(error.detail)).response()


def _json(value: Any, status: int = 200) -> Response:
    return Response(orjson.dumps(value), status_code=status, media_type="application/json")


class Endpoints:
    """Every failure leaves as an ApiError."""

    def __init__(self, front: Front) -> None:
        self._front = front
        self._served = front.served

    async def completions(self, request: Request) -> Response:
        def prepare(body: dict[str, Any], key: ApiKey | None) -> tuple[Generation, bool]:
            parsed = _validate(CompletionRequest, body)
            return completions.prepare(parsed, self._served, key), bool(parsed.stop)

        return await self._generate(request, prepare)

    async def chat(self, request: Request) -> Response:
        def prepare(body: dict[str, Any], key: ApiKey | None) -> tuple[Generation, bool]:
            parsed = _validate(ChatRequest, body)
            return chat.prepare(parsed, self._served, key), bool(parsed.stop)

        return await self._generate(request, prepare)

    async def _generate(self, request: Request, prepare: Prepare) -> Response:
        try:
            key = request.scope.get("api_key")
            self._front.check_open(key)
            with self._front.traffic.accepted(), self._front.admission.reading(key):
                body, heavy = await self._body(request)
                salt_body(body, request.headers)
                body.setdefault("request_id", request.state.request_id)
                generation, early_stop = (
                    await asyncio.to_thread(prepare, body, key) if heavy else prepare(body, key)
                )
                await constraints.admit(generation.grammars, self._served)
        except ApiError as error:
            self._front.telemetry.failed(error)
            raise
        if not request.state.request_id_given:
            request.state.request_id = body["request_id"]
        return GenerationResponse(generation, self._front, early_stop, key)

    async def _body(self, request: Request) -> tuple[dict[str, Any], bool]:
        limits = self._served.limits
        return await read_json(
            request, limits.body_bytes, limits.json_depth, seconds=limits.upload_seconds
        )

    async def models(self) -> Response:
        cards = [self._card(name) for name in self._served.names]
        return _json({"object": "list", "data": cards})

    async def model(self, model_id: str) -> Response:
        check_model(model_id, self._served)
        return _json(self._card(model_id))

    def _card(self, name: str) -> dict[str, Any]:
        return {
            "id": name,
            "object": "model",
            "created": self._served.created,
            "owned_by": "expertmesh",
            "root": self._served.root,
            "parent": None,
            "max_model_len": self._served.max_model_len,
        }

    async def health(self) -> Response:
        """Live: this process answers. Whether it can serve is /ready."""
        return Response(status_code=200)

    async def ready(self) -> Response:
        ready, reason = self._front.ready()
        if ready and self._front.leaving:
            ready, reason = False, "the server is about to stop"
        if not ready:
            raise unavailable(reason)
        return _json({"status": "ready", "model": self._served.name})

    async def load(self) -> Response:
        """What is under way here, and in each engine that answers."""
        engines = await self._front.client.stats()
        traffic = self._front.traffic
        return _json(
            {
                "server_load": traffic.requests,
                "streams": traffic.streams,
                "queued": self._front.admission.waiting,
                "engines": {
                    name: {"running": one.running, "waiting": one.waiting}
                    for name, one in engines.items()
                    if one is not None
                },
            }
        )

    async def version(self) -> Response:
        return _json({"version": __version__})

    async def _tokenizing(
        self, request: Request, model: type[Tokenizing], param: str
    ) -> tuple[Tokenizing, bool, Tokenizer]:
        """The checked body, whether it is heavy, and the tokenizer that both directions need."""
        body, heavy = await self._body(request)
        parsed = _validate(model, body)
        check_model(parsed.model, self._served)
        if self._served.tokenizer is None:
            raise bad("this checkpoint has no tokenizer", param)
        return parsed, heavy, self._served.tokenizer

    async def tokenize(self, request: Request) -> Response:
        parsed, heavy, tokenizer = await self._tokenizing(request, TokenizeRequest, "prompt")
        if (parsed.prompt is None) == (parsed.messages is None):
            raise bad("give either prompt or messages", "prompt")
        for name in ("tools", "chat_template_kwargs"):
            if parsed.prompt is not None and name in parsed.model_fields_set:
                raise bad(f"{name} goes with messages, not with a prompt", name)

        def encode() -> list[int]:
            if parsed.prompt is not None:
                return tokenizer.encode(parsed.prompt)
            thinking = chat.effort(parsed.chat_template_kwargs, None)
            turn = chat.render(
                parsed.messages, parsed.tools, thinking, self._served, tool_choice=None
            )
            return turn.prompt_ids

        ids = await asyncio.to_thread(encode) if heavy else encode()
        answer: dict[str, Any] = {
            "count": len(ids),
            "max_model_len": self._served.max_model_len,
            "tokens": ids,
            "token_strs": None,
        }
        if parsed.return_token_strs:
            answer["token_strs"] = [tokenizer.token_text(token) for token in ids]
        return _json(answer)

    async def detokenize(self, request: Request) -> Response:
        parsed, heavy, tokenizer = await self._tokenizing(request, DetokenizeRequest, "tokens")
        check_ids(parsed.tokens, self._served.vocab_size, "tokens")
        arguments = (parsed.tokens, parsed.skip_special_tokens)
        if heavy:
            text = await asyncio.to_thread(tokenizer.decode, *arguments)
        else:
            text = tokenizer.decode(*arguments)
        return _json({"prompt": text})


def _validate(model: type[Model], body: dict[str, Any]) -> Model:
    if issubclass(model, SamplingRequest):
        for key in body:
            if key in SamplingRequest.renamed:
                raise bad(
                    f"'{key}' is now {SamplingRequest.renamed[key]}", key, "unknown_parameter"
                )
            if key in SamplingRequest.unsupported:
                raise unsupported(key, key)
    try:
        return model.model_validate(body)
    except ValidationError as error:
        raise from_validation(error) from None
