"""Recorded decode passes over a mesh: epochs and placements change, what was recorded stays."""

import itertools
import threading
from collections.abc import Callable
from typing import Any

import pytest
from torch import Tensor

from expertmesh.actors.attention.engine import Engine
from expertmesh.actors.attention.messages import GenerateRequest, SamplingParams
from expertmesh.actors.attention.settings import EngineSettings
from expertmesh.actors.exchange.base import Exchange, LocalExchange
from expertmesh.actors.exchange.elastic import ElasticExchange
from expertmesh.actors.exchange.mesh import MeshExchange
from expertmesh.actors.exchange.process_group import open_store
from expertmesh.actors.exchange.roster import Roster
from expertmesh.actors.exchange.serve import MeshServer
from expertmesh.actors.exchange.settings import ExchangeSettings
from expertmesh.actors.experts.bank import ExpertBank
from expertmesh.actors.model.forward import EagerRunner
from expertmesh.actors.model.graphs import GraphRunner
from expertmesh.actors.model.loading import LoadSettings, OpenModel
from expertmesh.actors.model.model import Model
from tests.actors.exchange.toy import HOST, in_threads
from tests.support.checkpoints import write_checkpoint
from tests.support.graph_tape import Tape
from tests.support.padded_kernels import padded

EXPERTS = 7
SETTINGS = ExchangeSettings(layout="mixed", deadline_s=5.0, max_rows=32)


@pytest.fixture(scope="module")
def opened(tmp_path_factory: pytest.TempPathFactory) -> OpenModel:
    folder = write_checkpoint(tmp_path_factory.mktemp("mesh") / "model", num_experts=EXPERTS)
    return LoadSettings(model=folder, device="cpu").open()


def bank_of(opened: OpenModel, ids: list[int]) -> ExpertBank:
    placed = dict.fromkeys(opened.config.moe_layers, ids)
    kernels, dtype = opened.kernels, opened.dtype
    return ExpertBank(
        opened.config, kernels, placed, opened.source, dtype=dtype, cache_bytes=1 << 22
    )


class Epochs:
    """The epochs of one attention rank, each with other actors."""

    def __init__(self, opened: OpenModel) -> None:
        self._opened = opened
        self.elastic = ElasticExchange(10.0)
        self.threads: list[threading.Thread] = []
        self._stores: list[Any] = []

    def enter(self, actors: int) -> None:
        config, number = self._opened.config, len(self._stores)
        cuts = [EXPERTS * actor // actors for actor in range(actors + 1)]
        held = [list(range(begin, end)) for begin, end in itertools.pairwise(cuts)]
        store, address = open_store(HOST)
        self._stores.append(store)
        roster = Roster(number, 1, actors, dict.fromkeys(config.moe_layers, held), address)
        sizes = {"width": config.latent_size, "top_k": config.experts_per_token, "host": HOST}

        def attention() -> MeshExchange:
            return MeshExchange(roster, 0, SETTINGS, num_experts=EXPERTS, **sizes)

        def expert(actor: int) -> MeshServer:
            bank, dtype = bank_of(self._opened, held[actor]), self._opened.dtype
            return MeshServer(roster, actor + 1, SETTINGS, bank, dtype=dtype, **sizes)

        makers = [attention, *(lambda a=a: expert(a) for a in range(actors))]
        exchange, *servers = in_threads(makers)
        for server in servers:
            thread = threading.Thread(target=self._serve, args=(server,), daemon=True)
            thread.start()
            self.threads.append(thread)
        self.elastic.offer(exchange)
        self.elastic.switch(number)

    @staticmethod
    def _serve(server: MeshServer) -> None:
        # An epoch that another takes over from ends with an error here: that is no news.
        try:
            server.run()
        except RuntimeError:
            server.close()


class Interrupted:
    """The elastic exchange, with something that happens before its n-th dispatch."""

    def __init__(self, inner: Exchange, at: dict[int, Callable[[], None]]) -> None:
        self._inner, self._at, self._count = inner, at, 0
        self.combine, self.end_step = inner.combine, inner.end_step
        self.begin_step = inner.begin_step

    def dispatch(self, *args: Any) -> Tensor:
        self._count += 1
        self._at.get(self._count, lambda: None)()
        made: Tensor = self._inner.dispatch(*args)
        return made


def generate(model: Model, exchange: Exchange, ping_pong: bool) -> dict[str, list[int]]:
    settings = EngineSettings(pages=64, slots=8, step_tokens=96, ping_pong=ping_pong)
    engine = Engine(model, model.new_state(64, 8), exchange, settings, model.config.eos)
    for index in range(5):
        prompt = [(index * 13 + i * 5) % 300 + 1 for i in range(3 + 9 * index)]
        params = SamplingParams(max_tokens=6 + 2 * index, temperature=0.0, ignore_eos=True)
        engine.submit(GenerateRequest(f"r{index}", prompt, params))
    tokens: dict[str, list[int]] = {}
    while engine.has_work:
        for output in engine.step():
            assert output.error is None, output.error
            tokens.setdefault(output.request_id, []).extend(output.token_ids)
    return tokens


@pytest.mark.parametrize("ping_pong", [False, True])
def test_epochs_change_under_recorded_passes(opened: OpenModel, ping_pong: bool) -> None:
    """Between two layers of a decode step the epoch is replaced, twice, with more and with fewer
    actors: the step goes on, the tokens are those of one process, nothing is recorded again."""
    tape = Tape()
    plain = Model(opened.config, opened.kernels, opened.source, dtype=opened.dtype)
    kernels = padded(opened.kernels, tape.opaque)
    model = Model(opened.config, kernels, opened.source, dtype=opened.dtype)
    model.runner = runner = GraphRunner(model, EagerRunner(model, model.uploads), tape)
    epochs = Epochs(opened)
    epochs.enter(2)
    layers = len(opened.config.moe_layers)
    changes = {6 * layers + 2: lambda: epochs.enter(3), 9 * layers + 1: lambda: epochs.enter(1)}
    got = generate(model, Interrupted(epochs.elastic, changes), ping_pong)
    assert epochs.elastic.epoch == 2
    epochs.elastic.close()
    for thread in epochs.threads:
        thread.join(5)
        assert not thread.is_alive()
    everything = LocalExchange(bank_of(opened, list(range(EXPERTS))))
    assert got == generate(plain, everything, ping_pong)
    assert tape.warmed == len(runner.buckets) > 1
    assert tape.replays > 5 * tape.warmed
