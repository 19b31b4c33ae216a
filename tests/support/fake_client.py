"""An EngineClient with a script instead of a model, and the engine's streaming semantics."""

import asyncio
import math
from collections.abc import AsyncIterator, Callable, Mapping, Sequence

from expertmesh.actors.attention.messages import (
    EngineStats,
    GenerateRequest,
    KvReport,
    TokenLogprobs,
    TokenOutput,
)
from expertmesh.actors.state.session_messages import SessionAnswer, SessionCall
from expertmesh.deploy.engine_client import Ended, EngineUnavailable, Pace, at_once
from expertmesh.deploy.mailbox import Mailbox

Script = Callable[[GenerateRequest], Sequence[int]]


def echo_prompt(request: GenerateRequest) -> Sequence[int]:
    """The default script: the prompt again and again."""
    ids = request.prompt_ids
    return ids * (-(-request.params.max_tokens // len(ids)) if request.params.max_tokens else 0)


def no_session(call: SessionCall) -> SessionAnswer:
    """The default answer: there are none."""
    if call.verb == "list":
        return SessionAnswer(views=[])
    return SessionAnswer(problem="unknown", message="there is no such session")


def entry(token: int, top: int, vocab_size: int) -> TokenLogprobs:
    """A made-up but self-consistent log-probability: the token is the likeliest."""
    others = [(token + i) % vocab_size for i in range(top)]
    return TokenLogprobs(
        token_id=token,
        logprob=-0.5,
        rank=1,
        top=[(other, -0.5 - i) for i, other in enumerate(others)],
    )


class FakeEngineClient:
    """Emits the script's ids, one output per token, `seconds` apart.

    Public knobs: `script`, `seconds`, `fail_after` (tokens until an error output), `down` (the
    reason `ready` gives), `refuse` (raised by generate), `gate` (an Event every token waits for),
    `cached` (prompt tokens that were not computed, per request), `kv` (how old ones were read),
    `answer` (to calls about sessions, which `calls` keeps).
    """

    def __init__(
        self, script: Script = echo_prompt, *, seconds: float = 0.0, vocab_size: int = 320,
        eos: frozenset[int] = frozenset(),
    ) -> None:  # fmt: skip
        self.script = script
        self.seconds = seconds
        self.vocab_size = vocab_size
        self.eos = eos
        self.fail_after: int | None = None
        self.down = ""
        self.refuse: Exception | None = None
        self.gate: asyncio.Event | None = None
        self.cached: Callable[[GenerateRequest], int] = lambda request: 0
        self.kv: KvReport | None = None
        self.answer: Callable[[SessionCall], SessionAnswer] = no_session
        self.calls: list[SessionCall] = []
        self.requests: list[GenerateRequest] = []
        self.aborted: list[str] = []
        self.running = 0
        self.counters = EngineStats(pages_total=8, pages_free=6, slots_total=4, slots_free=4)

    async def generate(
        self, request: GenerateRequest, pace: Pace = at_once, ended: Ended = None
    ) -> AsyncIterator[TokenOutput]:
        self.requests.append(request)
        if self.refuse is not None:
            raise self.refuse
        mailbox = Mailbox(asyncio.get_running_loop(), ended)
        producer = asyncio.create_task(self._produce(request, mailbox))
        finished = False
        self.running += 1
        try:
            while not finished:
                output = await mailbox.take(pace)
                finished = output.finish_reason is not None
                yield output
        finally:
            self.running -= 1
            producer.cancel()
            if not finished:
                self.abort(request.request_id)

    async def _produce(self, request: GenerateRequest, mailbox: Mailbox) -> None:
        params = request.params
        prompt_logprobs = None
        if params.prompt_logprobs is not None:
            prompt_logprobs = [
                None if i == 0 else entry(token, params.prompt_logprobs, self.vocab_size)
                for i, token in enumerate(request.prompt_ids)
            ]

        def output(ids: list[int], finish: str | None, stop_reason: int | None) -> TokenOutput:
            nonlocal prompt_logprobs
            out = TokenOutput(
                request_id=request.request_id,
                token_ids=ids,
                logprobs=None if params.logprobs is None
                else [entry(token, params.logprobs, self.vocab_size) for token in ids],
                prompt_logprobs=prompt_logprobs,
                finish_reason=finish,  # type: ignore[arg-type]
                stop_reason=stop_reason,
                prompt_tokens=len(request.prompt_ids),
                cached_tokens=self.cached(request),
                kv=self.kv,
            )  # fmt: skip
            prompt_logprobs = None
            self.counters.generation_tokens += len(ids)
            return out

        if not params.max_tokens:
            mailbox.put(output([], "length", None))
            return
        for count, token in enumerate(self.script(request), start=1):
            if self.gate is not None:
                await self.gate.wait()
            await asyncio.sleep(self.seconds)
            if self.fail_after is not None and count > self.fail_after:
                failed = output([], "error", None)
                failed.error = "rank 1, layer 2, combine: the peer closed"
                mailbox.put(failed)
                return
            ends = not params.ignore_eos and token in self.eos
            if count > params.min_tokens and (ends or token in params.stop_token_ids):
                mailbox.put(output([token], "stop", None if ends else token))
                return
            if count == params.max_tokens:
                mailbox.put(output([token], "length", None))
                return
            mailbox.put(output([token], None, None))
        await asyncio.sleep(math.inf)  # a script shorter than max_tokens never ends by itself

    def abort(self, request_id: str) -> None:
        self.aborted.append(request_id)

    def ready(self) -> tuple[bool, str]:
        return not self.down, self.down

    async def stats(self) -> Mapping[str, EngineStats]:
        return {"0": self.counters}

    async def session(self, call: SessionCall) -> SessionAnswer:
        self.calls.append(call)
        if self.down:
            raise EngineUnavailable(self.down)
        return self.answer(call)
