"""An expert actor: holds a share of the routed experts and serves the epochs it is part of."""

import threading
from collections.abc import Mapping, Sequence

import msgspec

from expertmesh.actors.exchange.roster import Roster
from expertmesh.actors.exchange.serve import LayerWork, MeshServer
from expertmesh.actors.exchange.settings import ExchangeSettings
from expertmesh.actors.experts.bank import ExpertBank
from expertmesh.actors.model.loading import LoadSettings, OpenModel
from expertmesh.actors.process import LoadState, Whereabouts, settle


class ExpertStats(msgspec.Struct, frozen=True):
    """rows: received rows that carry a token. busy_seconds: in the experts' GEMMs."""

    steps: int = 0
    rows: dict[int, int] = {}
    busy_seconds: dict[int, float] = {}
    packed_bytes: int = 0
    cached_bytes: int = 0
    failed: str | None = None


class ExpertActor:
    """Run as a threaded Ray actor: a load or a join in one thread never delays `health`."""

    def __init__(self, load: LoadSettings, exchange: ExchangeSettings) -> None:
        self._load, self._exchange = load, exchange
        self._address = "127.0.0.1"
        self._open: OpenModel | None = None
        self._bank: ExpertBank | None = None
        self._total = 0
        self._server: MeshServer | None = None
        self._thread: threading.Thread | None = None
        self._failed: str | None = None

    def settle(self, address: str, threads: int) -> Whereabouts:
        self._address = address
        return settle(address, threads)

    def load(self, placed: Mapping[int, Sequence[int]]) -> int:
        """Loads `placed` (layer -> experts in slot order); returns the bytes now held.

        Raises ConfigError and CheckpointError naming tensor and shard.
        """
        opened = self._load.open()
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
        return self._bank.packed_bytes

    def progress(self) -> LoadState:
        done = 0 if self._open is None else self._open.source.bytes_read
        return LoadState(min(done, self._total), self._total)

    def join(self, roster: Roster, rank: int) -> None:
        """Meets the other ranks of an epoch and serves it from now on. Raises ExchangeError."""
        assert self._open is not None and self._bank is not None, "load() before join()"
        config = self._open.config
        server = MeshServer(
            roster,
            rank,
            self._exchange,
            self._bank,
            width=config.latent_size,
            top_k=config.experts_per_token,
            dtype=self._open.dtype,
            host=self._address,
            device=self._open.device,
        )
        self._server, self._failed = server, None
        name = f"expert-epoch-{roster.epoch}"
        self._thread = threading.Thread(target=self._serve, args=(server,), name=name, daemon=True)
        self._thread.start()

    def _serve(self, server: MeshServer) -> None:
        try:
            server.run()
            reason = "the attention side has ended the epoch"
        except Exception as error:
            reason = f"{type(error).__name__}: {error}"
        if server is self._server:  # an epoch that was replaced may end as it likes
            self._failed = reason

    def health(self) -> tuple[bool, str]:
        """Whether this actor serves its epoch, and if not, why."""
        if self._failed is not None:
            return False, self._failed
        if self._server is None:
            return False, "in no epoch yet"
        return True, ""

    def stats(self) -> ExpertStats:
        work: dict[int, LayerWork] = {} if self._server is None else self._server.work
        return ExpertStats(
            steps=0 if self._server is None else self._server.steps,
            rows={layer: done.rows for layer, done in work.items()},
            busy_seconds={layer: done.busy_s for layer, done in work.items()},
            packed_bytes=0 if self._bank is None else self._bank.packed_bytes,
            cached_bytes=0 if self._bank is None else self._bank.cached_bytes,
            failed=self._failed,
        )

    def leave(self) -> None:
        """Ends the present epoch on this rank."""
        server, self._server = self._server, None
        if server is not None:
            server.close()
