"""An attention actor: one engine replica behind four verbs: submit, abort, stream, health.

It runs as an asyncio Ray actor. The event loop only passes messages; the model runs in the
engine's thread, loading and joining in threads of their own.
"""

import asyncio
import logging
import time
from collections.abc import AsyncIterator

import msgspec

from expertmesh.actors.attention.engine import Engine
from expertmesh.actors.attention.loop import EngineLoop
from expertmesh.actors.attention.messages import (
    EngineBusy,
    EngineFailed,
    EngineStats,
    GenerateRequest,
    QuotaExceeded,
    RequestRefused,
)
from expertmesh.actors.attention.outbox import Outboxes, stream
from expertmesh.actors.attention.settings import EngineSettings
from expertmesh.actors.attention.warm_up import warm_up
from expertmesh.actors.constraint.compiler import Grammars
from expertmesh.actors.exchange.base import Exchange, LocalExchange
from expertmesh.actors.exchange.counting import CountingExchange, RoutingCounts, RoutingSnapshot
from expertmesh.actors.exchange.elastic import ElasticExchange
from expertmesh.actors.exchange.mesh import MeshExchange
from expertmesh.actors.exchange.process_group import open_store
from expertmesh.actors.exchange.roster import Roster, Routing
from expertmesh.actors.exchange.settings import ExchangeSettings
from expertmesh.actors.experts.bank import ExpertBank
from expertmesh.actors.model.loading import LoadSettings, OpenModel
from expertmesh.actors.model.model import Model
from expertmesh.actors.model.tokenizer import Tokenizer
from expertmesh.actors.process import (
    Health,
    LoadState,
    Pulse,
    Whereabouts,
    keep_heap,
    settle,
)
from expertmesh.actors.state.fingerprint import fingerprint
from expertmesh.actors.state.item import StateLayout
from expertmesh.actors.state.opening import open_tiers
from expertmesh.actors.state.session_messages import SessionCall, SessionProblem
from expertmesh.actors.state.tiers.store import TieredStore

_log = logging.getLogger(__name__)

# How long an idle engine loop may take to answer a knock before it counts as stuck.
KNOCK_S = 1.0
INGRESS_SILENCE_S = 10.0
# An epoch that has been broken for so long may have no successor soon: no more requests then.
BROKEN_S = 10.0
# How long all ranks may take to flip to a new routing, and how often one looks.
FLIP_S, FLIP_POLL_S = 10.0, 0.005

# (kind, message, field): why a request was not taken. kind: refused | busy | failed.
Refusal = tuple[str, str, str]


class ReplicaStats(msgspec.Struct):
    """An engine's counters with those of its end of the exchange.

    rows_sent: to all expert actors together. epoch, version: what it serves now. held_seconds: how
    long the present step has been waiting for another epoch.
    """

    engine: EngineStats = msgspec.field(default_factory=EngineStats)
    routing: RoutingSnapshot | None = None
    epoch: int = -1
    version: int = 0
    rows_sent: int = 0
    dispatch_seconds: float = 0.0
    combine_seconds: float = 0.0
    held_seconds: float = 0.0


def replica_stats(answer: bytes) -> ReplicaStats:
    """What AttentionActor.stats has answered."""
    return msgspec.msgpack.decode(answer, type=ReplicaStats)


class AttentionActor:
    def __init__(
        self,
        load: LoadSettings,
        engine: EngineSettings,
        exchange: ExchangeSettings,
        *,
        step_limit_s: float = 60.0,
        hold_s: float = 60.0,
    ) -> None:
        """step_limit_s: a step that computes for longer is stuck. hold_s: how long a step may wait
        for another epoch after its own has broken, before its requests fail."""
        self._load, self._settings, self._exchange_settings = load, engine, exchange
        self._step_limit_s = step_limit_s
        self._address = "127.0.0.1"
        self._open: OpenModel | None = None
        self._model: Model | None = None
        self._grammars: Grammars | None = None
        self._local: LocalExchange | None = None
        self._counts: RoutingCounts | None = None
        self._total, self._loaded = 0, False
        self._stores: dict[int, object] = {}
        self._fingerprint = b""
        self._tiers: TieredStore | None = None  # outlives an engine that fails
        self._elastic = ElasticExchange(hold_s, self._wake)
        self._broke_at: float | None = None  # when this epoch was first seen to be broken
        self._loop: EngineLoop | None = None
        self._starting = asyncio.Lock()  # one engine drives the exchange, however often it is asked
        self._boxes: Outboxes | None = None
        self._decode = msgspec.msgpack.Decoder(list[GenerateRequest]).decode

    # --- start --------------------------------------------------------------------------------

    async def settle(self, address: str, threads: int) -> Whereabouts:
        self._address = address
        return settle(address, threads)

    async def load(self, with_experts: bool = False) -> int:
        """Loads the attention half, and all experts too when there is no expert tier.

        Returns the bytes read. Raises ConfigError, CheckpointError and TokenizerError.
        """
        return await asyncio.to_thread(self._load_now, with_experts)

    def _load_now(self, with_experts: bool) -> int:
        opened = self._load.open()
        source, config = opened.source, opened.config
        everything = dict.fromkeys(config.moe_layers, range(config.num_experts))
        names = list(source.names_for_attention())
        if with_experts:
            for layer, ids in everything.items():
                names += source.names_for_experts(layer, ids)
        self._total, self._open = source.nbytes(names), opened
        dtype, device = opened.dtype, opened.device
        self._model = Model(
            config, opened.kernels, source,
            dtype=dtype, device=device, graphs=self._settings.graphs,
        )  # fmt: skip
        self._counts = RoutingCounts(
            config.moe_layers, config.num_experts, config.experts_per_token, device
        )
        if with_experts:
            cache = self._load.expert_cache_bytes
            bank = ExpertBank(
                config, opened.kernels, everything, source,
                dtype=dtype, device=device, cache_bytes=cache,
            )  # fmt: skip
            self._local = LocalExchange(bank)
        source.close()
        self._fingerprint = fingerprint(opened, self._load)
        self._tiers = open_tiers(
            StateLayout.of(config, dtype), self._settings.state, lambda: self._wake()
        )
        if device.type != "cpu":
            warm_up(self._model)
        self._grammars = Grammars.of(Tokenizer.load(self._load.model, config), config.eos)
        keep_heap()
        self._loaded = True
        return source.bytes_read

    async def progress(self) -> LoadState:
        done = 0 if self._open is None else self._open.source.bytes_read
        return LoadState(min(done, self._total), self._total)

    # --- epochs -------------------------------------------------------------------------------

    async def open_store(self, epoch: int) -> tuple[str, int]:
        """Where the ranks of an epoch meet, on this node. Called on its rank 0 only."""
        self._stores[epoch], address = await asyncio.to_thread(open_store, self._address)
        return address

    async def prepare(self, roster: Roster | None, rank: int) -> None:
        """Meets the other ranks of an epoch, while the present one goes on. None: the experts are
        in this process. Raises ExchangeError."""
        assert self._model is not None, "load() before prepare()"
        if roster is None:
            assert self._local is not None, "load(with_experts=True) before prepare(None)"
            return
        self._elastic.offer(await asyncio.to_thread(self._meet, roster, rank))

    def _meet(self, roster: Roster, rank: int) -> MeshExchange:
        assert self._model is not None, "load() before prepare()"
        config = self._model.config
        return MeshExchange(
            roster,
            rank,
            self._exchange_settings,
            width=config.latent_size,
            top_k=config.experts_per_token,
            num_experts=config.num_experts,
            host=self._address,
            dtype=self._model.dtype,
            device=self._model.device,
            on_wake=self._wake,
            kernels=self._model.kernels,
        )

    async def discard(self, epoch: int) -> None:
        """The epoch did not come about."""
        self._elastic.discard(epoch)
        self._stores.pop(epoch, None)

    async def switch(self, epoch: int) -> None:
        """Serves the prepared epoch from now on. A step in progress goes on in it, with the layer
        it had in flight; the first time, and after the engine has failed, an engine starts."""
        if self._local is None:
            await asyncio.to_thread(self._elastic.switch, epoch)
            self._broke_at = None
            for old in [number for number in self._stores if number < epoch]:
                del self._stores[old]
        async with self._starting:
            if self._loop is None or self._loop.failed is not None:
                await self._start_engine()

    async def _start_engine(self) -> None:
        model, counts, old = self._model, self._counts, self._loop
        assert model is not None and counts is not None, "load() before switch()"
        if old is not None:
            await asyncio.to_thread(old.stop)
        settings = self._settings
        state = await asyncio.to_thread(
            model.new_state, settings.pages, settings.slots, settings.state.places
        )
        inner: Exchange = self._elastic if self._local is None else self._local
        exchange = CountingExchange(inner, counts)
        eos, grammars = model.config.eos, self._grammars
        engine = Engine(
            model, state, exchange, settings, eos, grammars,
            fingerprint=self._fingerprint, store=self._tiers,
        )  # fmt: skip
        if self._boxes is None:
            self._boxes = Outboxes(asyncio.get_running_loop())
        self._loop = EngineLoop(engine, self._boxes.publish, peers_open=self._peers_open)
        self._loop.start()
        self._loop.wake()  # another replica may have opened a step while this one was getting ready

    async def route(self, routing: Routing) -> int:
        """Takes a new routing; returns once steps use it, with the version they use.

        Returns an older version when the epoch ends before, or after FLIP_S.
        """
        epoch, end = self._elastic.epoch, time.monotonic() + FLIP_S
        await asyncio.to_thread(self._elastic.route, routing)  # tables of many layers take a while
        while self._elastic.version < routing.version and time.monotonic() < end:
            if self._elastic.epoch != epoch or self._elastic.broken is not None:
                break
            await asyncio.sleep(FLIP_POLL_S)
        return self._elastic.version

    async def abort_epoch(self, epoch: int, reason: str) -> None:
        """The epoch has lost a member: whoever waits for it here stops, and waits for the next."""
        active = self._elastic.epoch
        if active <= epoch:
            await asyncio.to_thread(self._elastic.abort, reason, active)
            self._wake()

    def _peers_open(self) -> bool:
        return self._local is None and self._elastic.peer_waiting

    def _wake(self) -> None:
        if self._loop is not None:
            self._loop.wake()

    # --- serving ------------------------------------------------------------------------------

    async def submit(self, ingress: str, *requests: bytes) -> list[Refusal | None]:
        """Queues requests (msgpack list[GenerateRequest], split); one entry each, None when
        taken."""
        return [self._submit(ingress, request) for request in self._decode(b"".join(requests))]

    def _submit(self, ingress: str, request: GenerateRequest) -> Refusal | None:
        if self._loop is None or self._boxes is None:
            return "failed", "the replica is not serving yet", ""
        name = request.request_id
        if not self._boxes.claim(name, ingress):
            return "refused", f"request id {name!r} is already in use", "request_id"
        try:
            self._loop.engine.submit(request)
        except RequestRefused as error:
            self._boxes.release(name)
            kind = "quota" if isinstance(error, QuotaExceeded) else "refused"
            return kind, error.message, error.field
        except (EngineBusy, EngineFailed) as error:
            self._boxes.release(name)
            kind = "busy" if isinstance(error, EngineBusy) else "failed"
            return kind, str(error), ""
        return None

    async def abort(self, request_ids: list[str]) -> None:
        for request_id in request_ids:
            self._abort(request_id)

    def _abort(self, request_id: str) -> None:
        if self._loop is not None:
            self._loop.engine.abort(request_id)

    async def stream(self, ingress: str) -> AsyncIterator[bytes]:
        """Each step's outputs for this ingress, msgpack list[TokenOutput], for a Joiner. One stream
        per ingress: a new one takes over from the old. It also ends when the ingress is given up
        as silent."""
        assert self._boxes is not None, "join() before stream()"
        async for message in stream(self._boxes, ingress, self._abort):
            yield message

    async def session(self, call: bytes) -> bytes:
        """SessionAnswer as msgpack, to a SessionCall."""
        if self._loop is None:
            reason = SessionProblem("failed", "the replica is not serving yet")
            return msgspec.msgpack.encode(reason.answer())
        wish = msgspec.msgpack.decode(call, type=SessionCall)
        try:
            answer = await asyncio.wrap_future(self._loop.engine.session(wish))
        except EngineFailed as error:
            answer = SessionProblem("failed", str(error)).answer()
        return msgspec.msgpack.encode(answer)

    # --- watching -----------------------------------------------------------------------------

    async def health(self, ingress: str = "") -> Health:
        """Whether a request sent now would be served, now or when the next epoch is there.

        An ingress that passes its name shows that it lives. Once it has, its requests are aborted
        and its stream ends when it falls silent: Ray does not end the stream of a reader that
        died, and one that was only frozen comes back for a new stream.
        """
        if self._boxes is not None:
            if ingress:
                self._boxes.seen(ingress)
            for lost in self._boxes.silent(INGRESS_SILENCE_S):
                _log.warning("ingress %s is gone, its requests are aborted", lost)
                self._boxes.abandon(lost, self._abort)
        if self._loop is None:
            return Health(False, "in no epoch yet" if self._loaded else "loading")
        if self._loop.failed is not None:
            return Health(False, self._loop.failed, lost=True)
        trouble = self._alone() or await self._stuck()
        return Health(not trouble, trouble)

    def _alone(self) -> str:
        """Why no step can be made here for some time; front doors may not hear it from the control
        plane, which may be what has stopped."""
        broken, now = self._elastic.broken, time.monotonic()
        self._broke_at = None if broken is None else self._broke_at or now
        if self._broke_at is None or now - self._broke_at < BROKEN_S:
            return ""
        return f"no new epoch for {now - self._broke_at:.0f} s: {broken}"

    async def pulse(self) -> Pulse:
        """For the control plane; see Pulse."""
        if self._loop is None:
            return Pulse()
        broken = self._elastic.broken
        reason = "" if broken is None else str(broken)
        failed = self._loop.failed
        if failed is not None and broken is None:
            return Pulse(self._elastic.epoch, stuck=f"its engine has failed: {failed}")
        return Pulse(self._elastic.epoch, reason, await self._stuck())

    async def _stuck(self) -> str:
        """Why the engine's thread does not come round; "" when it does, or rightly waits."""
        loop = self._loop
        if loop is None or loop.failed is not None or self._elastic.held_seconds > 0:
            return ""
        knocks = loop.engine.arrived
        loop.wake()
        for _ in range(int(KNOCK_S / 0.01)):
            if not knocks.is_set() or loop.seconds_in_step() > 0:
                break
            await asyncio.sleep(0.01)
        else:
            return "the engine's thread does not answer"
        seconds = loop.seconds_in_step()
        if seconds > self._step_limit_s and self._elastic.held_seconds == 0:
            return f"the engine's step has been running for {seconds:.0f} s"
        return ""

    async def stats(self) -> bytes:
        """ReplicaStats as msgpack."""
        stats = ReplicaStats(epoch=self._elastic.epoch, version=self._elastic.version)
        if self._loop is not None:
            stats.engine = self._loop.engine.stats()
        if self._counts is not None:
            stats.routing = self._counts.snapshot()
        stats.rows_sent = self._elastic.rows_sent_total
        stats.dispatch_seconds = self._elastic.dispatch_s
        stats.combine_seconds = self._elastic.combine_s
        stats.held_seconds = self._elastic.held_seconds
        return msgspec.msgpack.encode(stats)

    async def start_recording(self, tokens: int) -> None:
        """Keeps the choices of the next `tokens` tokens, to be fetched by stop_recording."""
        assert self._counts is not None, "load() before start_recording()"
        self._counts.start_recording(tokens)

    async def recorded(self) -> int:
        """Tokens recorded so far."""
        return 0 if self._counts is None else self._counts.recorded

    async def stop_recording(self) -> bytes:
        """counting.Trace as msgpack."""
        assert self._counts is not None, "load() before stop_recording()"
        return msgspec.msgpack.encode(self._counts.stop_recording())

    async def give_up(self, reason: str) -> None:
        """No next epoch is in sight: requests that wait for one end with this reason, at once."""
        self._elastic.give_up(reason)
        self._wake()

    async def leave(self) -> None:
        """Stops the engine and ends the epoch. Requests still running end with an error."""
        self._elastic.give_up("the mesh is stopping")
        if self._loop is not None:
            await asyncio.to_thread(self._loop.stop)
        if self._tiers is not None:
            await asyncio.to_thread(self._tiers.close)
        await asyncio.to_thread(self._elastic.close)
