"""An attention actor: one engine replica behind four verbs: submit, abort, stream, health.

It runs as an asyncio Ray actor. The event loop only passes messages; the model runs in the
engine's thread, loading and joining in threads of their own.
"""

import asyncio
import logging
from collections.abc import AsyncIterator

import msgspec
from torch._C._distributed_c10d import TCPStore

from expertmesh.actors.attention.engine import Engine
from expertmesh.actors.attention.loop import EngineLoop
from expertmesh.actors.attention.messages import (
    EngineBusy,
    EngineFailed,
    EngineStats,
    GenerateRequest,
    RequestRefused,
)
from expertmesh.actors.attention.outbox import Outboxes, stream
from expertmesh.actors.attention.settings import EngineSettings
from expertmesh.actors.exchange.base import Exchange, LocalExchange
from expertmesh.actors.exchange.mesh import MeshExchange
from expertmesh.actors.exchange.process_group import open_store
from expertmesh.actors.exchange.roster import Roster
from expertmesh.actors.exchange.settings import ExchangeSettings
from expertmesh.actors.experts.bank import ExpertBank
from expertmesh.actors.model.loading import LoadSettings, OpenModel
from expertmesh.actors.model.model import Model
from expertmesh.actors.process import LoadState, Whereabouts, settle

_log = logging.getLogger(__name__)

# How long an idle engine loop may take to answer a knock before it counts as stuck.
KNOCK_S = 1.0
INGRESS_SILENCE_S = 10.0

# (kind, message, field): why a request was not taken. kind: refused | busy | failed.
Refusal = tuple[str, str, str]


class ReplicaStats(msgspec.Struct):
    """An engine's counters with those of its end of the exchange. rows_sent: by expert actor."""

    rank: int = 0
    engine: EngineStats = msgspec.field(default_factory=EngineStats)
    rows_sent: list[int] = []
    dispatch_seconds: float = 0.0
    combine_seconds: float = 0.0


class AttentionActor:
    def __init__(
        self,
        load: LoadSettings,
        engine: EngineSettings,
        exchange: ExchangeSettings,
        *,
        step_limit_s: float = 60.0,
    ) -> None:
        """step_limit_s: a step that runs longer makes the replica unhealthy."""
        self._load, self._settings, self._exchange_settings = load, engine, exchange
        self._step_limit_s = step_limit_s
        self._address, self._rank = "127.0.0.1", 0
        self._open: OpenModel | None = None
        self._model: Model | None = None
        self._local: LocalExchange | None = None
        self._total, self._loaded = 0, False
        self._store: TCPStore | None = None
        self._mesh: MeshExchange | None = None
        self._loop: EngineLoop | None = None
        self._boxes: Outboxes | None = None
        self._decode = msgspec.msgpack.Decoder(list[GenerateRequest]).decode

    # --- start --------------------------------------------------------------------------------

    async def settle(self, address: str, threads: int) -> Whereabouts:
        self._address = address
        return settle(address, threads)

    async def load(self, with_experts: bool = False) -> int:
        """Loads the attention half, and all experts too when there is no expert tier.

        Returns the bytes read. Raises ConfigError and CheckpointError.
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
        self._model = Model(config, opened.kernels, source, dtype=dtype, device=device)
        if with_experts:
            cache = self._load.expert_cache_bytes
            bank = ExpertBank(
                config, opened.kernels, everything, source,
                dtype=dtype, device=device, cache_bytes=cache,
            )  # fmt: skip
            self._local = LocalExchange(bank)
        source.close()
        self._loaded = True
        return source.bytes_read

    async def progress(self) -> LoadState:
        done = 0 if self._open is None else self._open.source.bytes_read
        return LoadState(min(done, self._total), self._total)

    async def open_store(self) -> tuple[str, int]:
        """Where the ranks of the next epoch meet, on this node. Called on rank 0 only."""
        self._store, address = await asyncio.to_thread(
            open_store, self._address, self._exchange_settings.join_deadline_s
        )
        return address

    async def join(self, roster: Roster | None, rank: int) -> None:
        """Meets the other ranks and starts the engine. None: experts are in this process."""
        exchange: Exchange
        if roster is None:
            assert self._local is not None, "load(with_experts=True) before join(None)"
            exchange = self._local
        else:
            exchange = self._mesh = await asyncio.to_thread(self._meet, roster, rank)
        model = self._model
        assert model is not None, "load() before join()"
        state = await asyncio.to_thread(model.new_state, self._settings.pages, self._settings.slots)
        engine = Engine(model, state, exchange, self._settings, model.config.eos)
        boxes = Outboxes(asyncio.get_running_loop())
        loop = EngineLoop(engine, boxes.publish, peers_open=self._peers_open)
        self._rank, self._boxes, self._loop = rank, boxes, loop
        loop.start()
        loop.wake()  # another replica may have opened a step while this one was getting ready

    def _meet(self, roster: Roster, rank: int) -> MeshExchange:
        assert self._model is not None, "load() before join()"
        config = self._model.config
        return MeshExchange(
            roster,
            rank,
            self._exchange_settings,
            width=config.latent_size,
            top_k=config.experts_per_token,
            num_experts=config.num_experts,
            host=self._address,
            device=self._model.device,
            on_wake=self._wake,
        )

    def _peers_open(self) -> bool:
        return self._mesh is not None and self._mesh.peer_waiting

    def _wake(self) -> None:
        if self._loop is not None:
            self._loop.wake()

    # --- serving ------------------------------------------------------------------------------

    async def submit(self, ingress: str, requests: bytes) -> list[Refusal | None]:
        """Queues requests (msgpack list[GenerateRequest]); one entry each, None when taken."""
        return [self._submit(ingress, request) for request in self._decode(requests)]

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
            return "refused", error.message, error.field
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
        """Each step's outputs for this ingress, msgpack list[TokenOutput]. One stream per ingress:
        a new one takes over from the old. It also ends when the ingress is given up as silent."""
        assert self._boxes is not None, "join() before stream()"
        async for message in stream(self._boxes, ingress, self._abort):
            yield message

    # --- watching -----------------------------------------------------------------------------

    async def health(self, ingress: str = "") -> tuple[bool, str]:
        """Whether a request sent now would be served: knocks at the engine's thread.

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
        loop = self._loop
        if loop is None:
            return False, "in no epoch yet" if self._loaded else "loading"
        if loop.failed is not None:
            return False, loop.failed
        knocks = loop.engine.arrived
        loop.wake()
        for _ in range(int(KNOCK_S / 0.01)):
            if not knocks.is_set() or loop.seconds_in_step() > 0:
                break
            await asyncio.sleep(0.01)
        else:
            return False, "the engine's thread does not answer"
        seconds = loop.seconds_in_step()
        if seconds > self._step_limit_s:
            return False, f"the engine's step has been running for {seconds:.0f} s"
        return True, ""

    async def stats(self) -> bytes:
        """ReplicaStats as msgpack."""
        stats = ReplicaStats(rank=self._rank)
        if self._loop is not None:
            stats.engine = self._loop.engine.stats()
        if self._mesh is not None:
            stats.rows_sent = self._mesh.rows_sent
            stats.dispatch_seconds = self._mesh.dispatch_s
            stats.combine_seconds = self._mesh.combine_s
        return msgspec.msgpack.encode(stats)

    async def fail(self, reason: str) -> None:
        """The mesh is broken: every request ends with an error that says why, at once."""
        if self._mesh is not None:
            await asyncio.to_thread(self._mesh.abort, reason)
        self._wake()

    async def leave(self) -> None:
        """Stops the engine and ends the epoch. Requests still running end with an error."""
        loop, mesh = self._loop, self._mesh
        if loop is not None:
            await asyncio.to_thread(loop.stop)
        if mesh is not None:
            await asyncio.to_thread(mesh.close)
