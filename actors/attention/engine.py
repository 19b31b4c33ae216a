"""One attention replica's engine: receive, plan, run, publish, one step at a time.

Only submit, abort, session, stats and has_work may be called from other threads; everything else
belongs to the thread that steps (loop.EngineLoop, or a test).
"""

import threading
from collections.abc import Iterable
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from time import perf_counter
from typing import Any, Protocol, runtime_checkable

import msgspec
from torch import Tensor

from expertmesh.actors.attention.contexts import Contexts
from expertmesh.actors.attention.inbox import Inbox
from expertmesh.actors.attention.masks import MaskMaker, Masks
from expertmesh.actors.attention.messages import (
    EngineStats,
    FinishReason,
    GenerateRequest,
    TokenLogprobs,
    TokenOutput,
)
from expertmesh.actors.attention.sampler import NO_TOKEN, Sampled, Sampler, SamplingKernels
from expertmesh.actors.attention.scheduler import Plan, Scheduler
from expertmesh.actors.attention.sequence import Sequence
from expertmesh.actors.attention.session_desk import NoSessions, SessionDesk
from expertmesh.actors.attention.settings import EngineSettings
from expertmesh.actors.attention.step import Step, build_step
from expertmesh.actors.attention.validation import Limits, check_request
from expertmesh.actors.constraint.compiler import Grammars
from expertmesh.actors.constraint.matcher import Matcher
from expertmesh.actors.constraint.spec import ConstraintError
from expertmesh.actors.exchange.base import Exchange
from expertmesh.actors.model.batch import Batch
from expertmesh.actors.model.config import ModelConfig
from expertmesh.actors.model.model import RoutingTrace
from expertmesh.actors.state.cache import StateCache
from expertmesh.actors.state.model_state import ModelState
from expertmesh.actors.state.pages import Pool
from expertmesh.actors.state.plain_cache import PlainCache, PlainState
from expertmesh.actors.state.session_messages import SessionAnswer, SessionCall
from expertmesh.actors.state.store import Store
from expertmesh.actors.state.tip import Tip

LOAD_LOOK_S = 1.0  # between two looks at loads that requests wait for


class ForwardModel(Protocol):
    """What the engine needs of a Model."""

    @property
    def config(self) -> ModelConfig: ...

    @property
    def kernels(self) -> SamplingKernels: ...

    def forward(
        self,
        batch: Batch,
        state: Any,
        exchange: Exchange,
        trace: RoutingTrace | None = None,
        *,
        ping_pong: bool = False,
    ) -> Tensor: ...


@runtime_checkable
class Joinable(Protocol):
    """An exchange whose ranks step together: one without work sends and receives zero rows."""

    def join_step(self) -> None: ...


class EngineStalled(RuntimeError):
    """Requests are queued and no plan serves any of them. A bug, but never a silent one."""


class Engine:
    """Continuous batching over one model and its state.

    An exception in a step fails the engine: every request in it ends with finish_reason "error",
    `failed` holds the reason, and later submits raise EngineFailed.
    """

    def __init__(
        self,
        model: ForwardModel,
        state: PlainState,
        exchange: Exchange,
        settings: EngineSettings,
        eos_ids: Iterable[int],
        grammars: Grammars | None = None,
        *,
        fingerprint: bytes | None = None,
        store: Store | None = None,
        arrived: threading.Event | None = None,
    ) -> None:
        """grammars: compiles constraints; without it requests that have one are refused.
        fingerprint: names the model's state; without it nothing is kept of a request. store: tiers
        below the device. arrived: set when there may be something to do, by the store too."""
        self.model, self.state, self.exchange, self.settings = model, state, exchange, settings
        self.cache: StateCache | PlainCache = PlainCache(state)
        if fingerprint is not None:
            assert isinstance(state, ModelState)
            self.cache = StateCache(state, settings.state, fingerprint, store, settings.step_tokens)
        self.pages, self.slots = self.cache.pages, Pool("slot", state.slots, compact=True)
        self._contexts = Contexts(model, settings, state.latents)
        near_pages, room = self._contexts.near_pages, self._contexts.room
        self.scheduler = Scheduler(settings, self.cache, self.slots, near_pages, room)
        self.sampler = Sampler(model.kernels, state.latents.device)
        self._masks = MaskMaker(model.config.vocab_size, state.latents.device)
        self._grammars = grammars
        self._eos_ids = frozenset(eos_ids)
        self.limits = Limits(
            vocab_size=model.config.vocab_size,
            max_context=min(settings.max_context or 2**62, model.config.max_position),
            pages=state.pages,
            max_logprobs=settings.max_logprobs,
            eos_ids=self._eos_ids,
            kv_mode=settings.state.kv_mode,
            near_pages=near_pages,
            room=room,
        )
        self.inbox = Inbox(grammars, arrived or threading.Event())
        self.sessions: SessionDesk | NoSessions = NoSessions()
        if isinstance(self.cache, StateCache) and store is not None:
            self.sessions = SessionDesk(self.cache, store, self.inbox.arrived)
        self._claiming: dict[str, GenerateRequest] = {}  # sessions that are being looked for
        self._sequences: dict[str, Sequence] = {}
        self._count = EngineStats(
            pages_total=state.pages,
            slots_total=state.slots,
            page_bytes=state.page_bytes,
            slot_bytes=state.slot_bytes,
        )
        self._now = 0.0  # when the tokens of this step were drawn
        self._submitted = 0

    # --- callable from any thread -------------------------------------------------------------

    def submit(self, request: GenerateRequest) -> None:
        """Queues a request. Raises RequestRefused, EngineBusy or EngineFailed, and then nothing of
        the request remains."""
        check_request(request, self.limits)
        self.sessions.check(request)
        self.inbox.submit(request, len(self.scheduler.running), self.settings.max_waiting)

    def abort(self, request_id: str) -> None:
        """Ends a request at the next step with finish_reason "abort". Unknown ids are ignored."""
        self.inbox.abort(request_id)

    def session(self, call: SessionCall) -> "Future[SessionAnswer]":
        """What becomes of a session. Raises EngineFailed, also out of the future."""
        return self.sessions.ask(call)

    @property
    def arrived(self) -> threading.Event:
        """Set whenever there may be something to do."""
        return self.inbox.arrived

    @property
    def failed(self) -> str | None:
        return self.inbox.failed

    @property
    def has_work(self) -> bool:
        queued = min(len(self.scheduler.waiting), self.settings.lookahead)
        busy = bool(self.scheduler.running) or queued > self.cache.loading
        return bool(self.inbox) or busy or self.sessions.has_work

    @property
    def patience(self) -> float | None:
        """Seconds to wait for `arrived` before looking for work all the same; None: for ever."""
        if self.cache.loading:  # a late load ends by itself, but whoever should tell may be dead
            return LOAD_LOOK_S
        return self.sessions.patience

    def stats(self) -> EngineStats:
        """A copy; the counters of one step may be seen half updated."""
        stats = msgspec.structs.replace(self._count, timings=self._count.timings.copy())
        stats.running = len(self.scheduler.running)
        stats.waiting = max(0, len(self.inbox.names) - stats.running)
        stats.waiting_tokens = self._waiting_tokens()
        stats.pages_free, stats.slots_free = self.pages.free, self.slots.free
        stats.preemptions = self.scheduler.preemptions
        stats.cache = self.cache.stats()
        self._contexts.count(stats.cache, list(self.scheduler.running))
        stats.cache.sessions = self.sessions.count
        stats.failed = self.failed
        return stats

    def _waiting_tokens(self) -> int:
        arrived = self.inbox.requests()
        return sum(len(each.prompt_ids) + len(each.resume_ids) for each in arrived) + sum(
            len(seq.tokens) - seq.computed
            for seq in list(self._sequences.values())
            if seq.computed < seq.prompt_len
        )

    # --- the stepping thread ------------------------------------------------------------------

    def step(self) -> list[TokenOutput]:
        """Receive, plan, run, publish. Returns what to send on, [] when nothing came of it."""
        count, outputs = self._count, list[TokenOutput]()
        try:
            start = perf_counter()
            self._receive(outputs)
            plan = self.scheduler.plan()
            if not (plan.decode or plan.prefill):
                self._check_idle()
                return outputs
            self._contexts.settle(self.scheduler.running)
            # Before the step's own snapshots take their places: it may begin with what was there.
            self.cache.begin(plan.admitted, plan.grown)
            step = build_step(plan, self.cache.saves)
            planned = perf_counter()
            making = self._masks.start(step.sampled)
            logits_RV = self._run(plan, step)
            ran = perf_counter()
            masks = None if making is None else making.result()
            sampled, broken = self._sample(step, logits_RV, masks)
            self._now = drawn = perf_counter()
            self.cache.observe(len(step.batch.token_ids_T) - len(plan.decode), drawn - planned)
            self._commit(step, sampled, broken)
            self._publish(step, sampled, broken, outputs)
            self._begin_again(outputs)
            count.steps += 1
            count.plan_seconds += planned - start
            count.forward_seconds += ran - planned
            count.sample_seconds += drawn - ran
            count.publish_seconds += perf_counter() - drawn
        except Exception as error:
            # What has ended in this step has left the books: its last output must still go out.
            outputs += self.fail(f"{type(error).__name__}: {error}")
        return outputs

    def join_step(self) -> list[TokenOutput]:
        """Takes part in a step that another rank of the mesh has opened, with no rows."""
        try:
            if isinstance(self.exchange, Joinable):
                self.exchange.join_step()
        except Exception as error:
            return self.fail(f"{type(error).__name__}: {error}")
        return []

    def fail(self, reason: str) -> list[TokenOutput]:
        """Ends every request with an error and refuses later ones."""
        names = self.inbox.close(reason)
        for seq in self._sequences.values():
            with suppress(Exception):  # the books may be what broke; every request must still end
                self.scheduler.remove(seq)
        self._count.finished_error += len(names)
        outputs = [
            TokenOutput(
                request_id=name,
                finish_reason="error",
                error=reason,
                lost=True,
                prompt_tokens=self._sequences[name].prompt_len if name in self._sequences else 0,
            )
            for name in names
        ]
        self._sequences.clear()
        self._claiming.clear()
        self.sessions.close(reason)
        return outputs

    def _receive(self, outputs: list[TokenOutput]) -> None:
        """Requests and aborts in the order they came; constrained ones once they are compiled."""
        self.sessions.work()
        for item in self.inbox.take():
            if isinstance(item, GenerateRequest):
                self._admit(item, None)
            elif isinstance(item, str):
                if item in self._sequences:
                    outputs.append(self._finish(self._sequences[item], "abort"))
                elif item in self._claiming:
                    outputs.append(self._turn_away(self._claiming.pop(item), "abort"))
            elif item.matcher is None:
                outputs.append(self._turn_away(item.request, "abort"))
            else:
                try:
                    matcher = item.matcher.result()
                except Exception as error:  # such as no thread to compile in: one request's loss
                    outputs.append(self._turn_away(item.request, "error", error))
                else:
                    self._admit(item.request, matcher)

    def _admit(self, request: GenerateRequest, matcher: Matcher | None) -> None:
        if not request.session:
            self._enter(request, matcher, None)
        else:
            self._claiming[request.request_id] = request
            self.sessions.claim(request, partial(self._claimed, request, matcher))

    def _claimed(self, request: GenerateRequest, matcher: Matcher | None, tip: Tip | None) -> None:
        if self._claiming.get(request.request_id) is request:  # else it was aborted meanwhile
            del self._claiming[request.request_id]
            self._enter(request, matcher, tip)

    def _enter(self, request: GenerateRequest, matcher: Matcher | None, tip: Tip | None) -> None:
        self._submitted += 1
        due = self.scheduler.due(self._count.steps, request.priority)
        arrived = self.inbox.names[request.request_id]
        seq = Sequence(request, self._submitted, due, self._eos_ids, arrived, matcher)
        self._sequences[seq.id] = seq
        self.cache.open(seq, request.tenant, self._contexts.enter(seq, request), tip)
        self.scheduler.add(seq)

    def _turn_away(
        self, request: GenerateRequest, why: FinishReason, error: Exception | None = None
    ) -> TokenOutput:
        """Ends a request that never became a sequence."""
        self.sessions.leave(request.request_id)
        self.inbox.names.pop(request.request_id, None)
        self._count_finish(why)
        output = TokenOutput(request_id=request.request_id, prompt_tokens=len(request.prompt_ids))
        output.finish_reason = why
        if isinstance(error, ConstraintError) and request.constraint is not None:
            output.error_field = request.constraint.field
            output.error = f"{output.error_field}: {error}"
        elif error is not None:
            output.error = f"the grammar was not compiled: {type(error).__name__}: {error}"
        return output

    def _check_idle(self) -> None:
        # What has arrived since the plan was made is served by the next one.
        if self._sequences and not self.cache.waiting:
            heads = self.scheduler.running[:1] + self.scheduler.waiting[:1]
            raise EngineStalled(
                f"{len(self.scheduler.running)} running and {len(self.scheduler.waiting)} waiting, "
                f"yet nothing to compute: {self.pages.free} of {self.pages.size} pages and "
                f"{self.slots.free} of {self.slots.size} slots are free, first in line "
                f"{[(seq.id, len(seq.tokens), seq.params.max_tokens) for seq in heads]}"
            )

    def _run(self, plan: Plan, step: Step) -> Tensor:
        timings, now = self._count.timings, perf_counter()
        timings.step_tokens.observe(len(step.batch.token_ids_T))
        for seq in plan.admitted:
            timings.start(seq.times, now)
        trace = RoutingTrace() if step.wants_routing else None
        logits_RV = self.model.forward(
            step.batch, self.state, self.exchange, trace, ping_pong=self.settings.ping_pong
        )
        for seq, begin, end in step.spans:
            if seq.lost:  # what came out for it means nothing
                continue
            if trace is not None and seq.params.want_routed_experts:
                new = begin + max(0, seq.high_water - seq.computed)
                if new < end:
                    seq.routing += trace.rows(new, end).cpu().numpy().astype("<i2").tobytes()
            if seq.computed < seq.high_water:
                again = min(end - begin, seq.high_water - seq.computed)
                self._count.recomputed_tokens += again
            seq.computed += end - begin
            if not seq.prompt_counted and seq.computed >= seq.prompt_len:
                seq.prompt_counted = True
                self._count.prompt_tokens += seq.prompt_len
        return logits_RV

    def _commit(self, step: Step, sampled: Sampled, broken: list[Sequence]) -> None:
        """What the step has computed is complete; others may find it unless it is no number."""
        self.cache.arrived()
        self._contexts.rest()
        drawn = zip(step.sampled, sampled.ids, strict=True)
        bad = {seq.number for seq in broken} | {s.number for s, token in drawn if token == NO_TOKEN}
        for seq, _, _ in step.spans:
            if seq.number not in bad and not seq.lost:
                self.cache.commit(seq)

    def _sample(
        self, step: Step, logits_RV: Tensor, masks: Masks | None
    ) -> tuple[Sampled, list[Sequence]]:
        """The step's tokens, and the sequences whose prompt could not be scored."""
        broken: list[Sequence] = []
        for rows in step.prompt_rows:
            seq, top = rows.sequence, rows.sequence.params.prompt_logprobs or 0
            if seq.lost:
                continue
            scores = self.sampler.score(logits_RV[rows.begin : rows.end], rows.tokens, top)
            if scores is None or seq.prompt_logprobs is None:
                broken.append(seq)
            else:
                seq.prompt_logprobs += scores
        if not step.sampled:
            return Sampled([], {}), broken
        if step.sample_rows is not None:
            logits_RV = self.sampler.rows(logits_RV, step.sample_rows)
        return self.sampler.sample(logits_RV, step.sampled, masks), broken

    def _publish(
        self, step: Step, sampled: Sampled, broken: list[Sequence], outputs: list[TokenOutput]
    ) -> None:
        for seq in broken:
            outputs.append(self._break(seq))
        for row, (seq, token) in enumerate(zip(step.sampled, sampled.ids, strict=True)):
            if seq in broken or seq.lost:
                continue
            if row in sampled.failures:
                outputs.append(self._stray(seq, sampled.failures[row]))
            else:
                outputs.append(self._deliver(seq, token, sampled.logprobs.get(row)))
        for seq in step.scored:
            if seq not in broken and not seq.lost:
                outputs.append(self._finish(seq, "length"))

    def _begin_again(self, outputs: list[TokenOutput]) -> None:
        """Sequences whose old pages are lost: without the disk that has lost them, to the same
        bits; or in another engine, where there is no room for that."""
        for seq in [seq for seq in self.scheduler.running if seq.lost]:
            hopeless = self._contexts.hopeless(seq)
            if hopeless:
                outputs.append(self._finish(seq, "abort", hopeless))
            else:
                self.scheduler.preempt(seq)

    def _deliver(self, seq: Sequence, token: int, logprobs: TokenLogprobs | None) -> TokenOutput:
        if token == NO_TOKEN:
            return self._break(seq)
        seq.append(token)
        self._count.generation_tokens += 1
        self._count.timings.token(seq.times, self._now)
        if seq.ends_with(token):
            output = self._finish(seq, "stop")
            output.stop_reason = token if seq.is_stop_id(token, self._eos_ids) else None
        elif seq.generated >= seq.params.max_tokens:
            output = self._finish(seq, "length")
        else:
            output = self._follow(seq, token)
        output.token_ids = [token]
        if logprobs is not None:
            output.logprobs = [logprobs]
        return output

    def _output(self, seq: Sequence) -> TokenOutput:
        """An output with what is due once (prompt log-probabilities) or piles up (routing)."""
        output = TokenOutput(request_id=seq.id, prompt_tokens=seq.prompt_len)
        output.cached_tokens = seq.prefix.hit or 0
        output.kv = self._contexts.report(seq)
        if seq.routing:
            output.routed_experts = bytes(seq.routing)
            seq.routing.clear()
        if seq.prompt_logprobs is not None and len(seq.prompt_logprobs) == seq.prompt_len:
            if not seq.prompt_reported:
                output.prompt_logprobs = seq.prompt_logprobs
            seq.prompt_reported = True
        return output

    def _finish(self, seq: Sequence, reason: FinishReason, error: str | None = None) -> TokenOutput:
        if reason in ("stop", "length"):
            self.sessions.save(seq)  # before its state is given back
        self.sessions.leave(seq.id)
        self.scheduler.remove(seq)
        del self._sequences[seq.id]
        self.inbox.names.pop(seq.id, None)
        self._count.timings.leave(seq.times)
        self._count_finish(reason)
        output = self._output(seq)
        output.finish_reason, output.error = reason, error
        return output

    def _count_finish(self, reason: FinishReason) -> None:
        counter = f"finished_{reason}"
        setattr(self._count, counter, getattr(self._count, counter) + 1)

    def _follow(self, seq: Sequence, token: int) -> TokenOutput:
        """The sequence goes on after this token."""
        if seq.matcher is not None:
            try:
                seq.matcher.accept([token])
            except ConstraintError as error:
                return self._stray(seq, str(error))
        return self._output(seq)

    def _stray(self, seq: Sequence, reason: str) -> TokenOutput:
        """Ends a sequence whose grammar has failed, and only that one."""
        assert seq.matcher is not None and self._grammars is not None
        constraint = seq.matcher.constraint
        self._grammars.forget(constraint)
        output = self._finish(seq, "error", f"{constraint.field}: {reason}")
        output.error_field = constraint.field
        return output

    def _break(self, seq: Sequence) -> TokenOutput:
        """Ends a sequence whose logits are no numbers, and only that one.

        Its pages are wiped: what is not finite would reach their next owner, for 0 * NaN is NaN
        even where the attention is masked.
        """
        self.cache.withdraw(seq)
        text = "prompt" if seq.computed <= seq.prompt_len else "answer"
        reason = f"the model's logits are not finite in the {text}, at position {seq.computed - 1}"
        return self._finish(seq, "error", reason)
