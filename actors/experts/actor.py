"""An expert actor: holds a share of the routed experts and serves the epochs it is part of."""

import time
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from expertmesh.actors.exchange.roster import Roster
from expertmesh.actors.exchange.serve import MeshServer
from expertmesh.actors.exchange.settings import ExchangeSettings
from expertmesh.actors.experts import transfer
from expertmesh.actors.experts.background import Background
from expertmesh.actors.experts.bank import ExpertBank
from expertmesh.actors.experts.peers import peer_of
from expertmesh.actors.experts.reread import Stamps, refuse_changes, shard_stamps
from expertmesh.actors.experts.serving import Epochs
from expertmesh.actors.experts.transfer import Packet, TransferError
from expertmesh.actors.experts.warm_up import warm_up
from expertmesh.actors.model.loading import LoadSettings, OpenModel
from expertmesh.actors.process import LoadState, Pulse, Whereabouts, keep_heap, settle

# layer -> experts
Share = Mapping[int, Sequence[int]]


class ExpertStats(msgspec.Struct, frozen=True):
    """All counted since the process began, over all its epochs.

    rows: received rows that carry a token. busy_seconds: in the experts' GEMMs. wall_seconds: since
    the experts were loaded. held: experts here, of all layers. transfer_failures: of those in, for
    whatever reason; checksum_failures: because of their bytes. moved_bytes: in and out.
    """

    steps: int = 0
    rows: dict[int, int] = {}
    busy_seconds: dict[int, float] = {}
    packed_bytes: int = 0
    cached_bytes: int = 0
    failed: str | None = None
    epoch: int = -1
    wall_seconds: float = 0.0
    held: int = 0
    transfers_in: int = 0
    transfers_out: int = 0
    transfer_failures: int = 0
    checksum_failures: int = 0
    moved_bytes: int = 0

    @property
    def busy_share(self) -> float:
        return sum(self.busy_seconds.values()) / self.wall_seconds if self.wall_seconds else 0.0


class ExpertActor:
    """Run as a threaded Ray actor: a load, a meeting or a transfer never delays `pulse`."""

    def __init__(self, load: LoadSettings, exchange: ExchangeSettings) -> None:
        self._load, self._exchange = load, exchange
        self._address = "127.0.0.1"
        self._open: OpenModel | None = None
        self._bank: ExpertBank | None = None
        self._shards: Stamps = {}
        self._loaded_at = 0.0
        self._total = 0
        self._epochs = Epochs(self._meet)
        # A thread each: one transfer in and one out at a time, and neither waits for an audit.
        self._incoming = Background("expert-adopt", lambda: self._epochs.steps)
        self._outgoing = Background("expert-give")
        self._audit = Background("expert-audit", lambda: self._epochs.steps)
        self._moved = transfer.Counts()

    def settle(self, address: str, threads: int) -> Whereabouts:
        self._address = address
        return settle(address, threads)

    # --- experts ------------------------------------------------------------------------------

    def load(self, placed: Share) -> int:
        """Loads the first experts; returns the bytes now held.

        Raises ConfigError and CheckpointError naming tensor and shard.
        """
        opened = self._load.open()
        self._shards = shard_stamps(opened.source.folder)
        names = [
            name for layer, ids in placed.items()
            for name in opened.source.names_for_experts(layer, ids)
        ]  # fmt: skip
        self._total = opened.source.nbytes(names)
        self._open = opened
        self._bank = ExpertBank(
            opened.config,
            opened.kernels,
            placed,
            opened.source,
            dtype=opened.dtype,
            device=opened.device,
            cache_bytes=self._load.expert_cache_bytes,
        )
        opened.source.close()
        if opened.device.type != "cpu":
            warm_up(self._bank, opened.config, opened.dtype)
        keep_heap()
        self._loaded_at = time.monotonic()
        return self._bank.packed_bytes

    def progress(self) -> LoadState:
        done = 0 if self._open is None else self._open.source.bytes_read
        return LoadState(min(done, self._total), self._total)

    def load_more(self, placed: Share) -> dict[int, tuple[int, ...]]:
        """Reads those of `placed` that are not here yet from the checkpoint, all or none; returns
        them. Raises CheckpointError, also when the files are not those of the start."""
        opened, bank = self._model(), self._experts()
        refuse_changes(opened.source.folder, self._shards)
        missing = {
            layer: tuple(expert for expert in ids if not bank.holds(layer, expert))
            for layer, ids in placed.items()
        }
        missing = {layer: ids for layer, ids in missing.items() if ids}
        try:
            bank.load(missing, opened.source)
        finally:
            opened.source.close()
        return missing

    def give(self, layer: int, expert: int) -> Packet:
        """A copy of an expert for another actor. Raises ExpertNotHeld."""
        packet = self._outgoing.run(lambda: transfer.give(self._experts(), layer, expert))
        self._moved.sent(packet.nbytes)
        return packet

    def adopt(
        self, layer: int, expert: int, source: Any, deadline_s: float, source_name: str = ""
    ) -> int:
        """Copies an expert out of another actor's memory; returns its checksum.

        source: an expert actor's Ray handle. Until all has been verified, and if anything fails,
        the expert is not here. Raises TransferError.
        """
        deadline = time.monotonic() + deadline_s
        peer, bank = peer_of(source, source_name), self._experts()
        try:
            adopted = self._incoming.run(
                lambda: transfer.adopt(bank, layer, expert, peer, deadline)
            )
        except TransferError as error:
            self._moved.failed(error)
            raise
        self._moved.received(adopted.nbytes)
        return adopted.checksum

    def drop(self, placed: Share, version: int) -> None:
        """Frees the experts `placed`. A step that still uses a routing older than `version` is an
        error from now on. What is not here already is skipped."""
        self._epochs.require_version(version)
        bank = self._experts()
        for layer, ids in placed.items():
            for expert in ids:
                if bank.holds(layer, expert):
                    bank.drop(layer, expert)

    def held(self) -> dict[int, tuple[int, ...]]:
        return self._experts().held()

    def checksums(self, placed: Share) -> dict[int, dict[int, int]]:
        """layer -> expert -> checksum of what is in memory now. Raises ExpertNotHeld."""
        bank = self._experts()
        return self._audit.run(
            lambda: {i: {e: bank.checksum(i, e) for e in ids} for i, ids in placed.items()}
        )

    # --- epochs -------------------------------------------------------------------------------

    def prepare(self, roster: Roster, rank: int) -> None:
        """Meets the other ranks of an epoch, beside the one that is served, and serves it too.

        Raises ExchangeError; nothing of the epoch is left then.
        """
        self._epochs.prepare(roster, rank)

    def retire(self, below_epoch: int) -> None:
        """Ends the epochs that have been replaced."""
        self._epochs.retire(below_epoch)

    def discard(self, epoch: int) -> None:
        """Ends a prepared epoch that shall not be used."""
        self._epochs.discard(epoch)

    def leave(self) -> None:
        """Ends all epochs on this rank."""
        self._epochs.close()

    def pulse(self) -> Pulse:
        return self._epochs.pulse()

    def health(self) -> tuple[bool, str]:
        """Whether this actor serves an epoch, and if not, why."""
        pulse = self._epochs.pulse()
        if pulse.broken:
            return False, f"epoch {pulse.epoch}: {pulse.broken}"
        return (True, "") if pulse.epoch >= 0 else (False, "in no epoch yet")

    def stats(self) -> ExpertStats:
        work, pulse, bank = self._epochs.work(), self._epochs.pulse(), self._bank
        return ExpertStats(
            steps=work.steps,
            rows={layer: done.rows for layer, done in work.layers.items()},
            busy_seconds={layer: done.busy_s for layer, done in work.layers.items()},
            packed_bytes=0 if bank is None else bank.packed_bytes,
            cached_bytes=0 if bank is None else bank.cached_bytes,
            failed=f"epoch {pulse.epoch}: {pulse.broken}" if pulse.broken else None,
            epoch=pulse.epoch,
            wall_seconds=time.monotonic() - self._loaded_at if bank is not None else 0.0,
            held=0 if bank is None else bank.count,
            **self._moved.now(),
        )

    def _meet(self, roster: Roster, rank: int) -> MeshServer:
        opened, config = self._model(), self._model().config
        return MeshServer(
            roster,
            rank,
            self._exchange,
            self._experts(),
            width=config.latent_size,
            top_k=config.experts_per_token,
            dtype=opened.dtype,
            host=self._address,
            device=opened.device,
            kernels=opened.kernels,
        )

    def _model(self) -> OpenModel:
        assert self._open is not None, "load() comes first"
        return self._open

    def _experts(self) -> ExpertBank:
        assert self._bank is not None, "load() comes first"
        return self._bank
