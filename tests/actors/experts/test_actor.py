"""The expert actor as a plain object: what it loads, serves and says of itself."""

import threading
import time

import pytest
import torch

from expertmesh.actors.exchange.base import LocalExchange
from expertmesh.actors.exchange.mesh import MeshExchange
from expertmesh.actors.exchange.process_group import open_store
from expertmesh.actors.exchange.roster import Roster
from expertmesh.actors.exchange.settings import ExchangeSettings
from expertmesh.actors.experts.actor import ExpertActor
from expertmesh.actors.experts.bank import ExpertBank
from expertmesh.actors.model.loading import LoadSettings
from tests.support.checkpoints import write_checkpoint

HOST = "127.0.0.1"
EXPERTS = 7


@pytest.fixture(scope="module")
def load(tmp_path_factory: pytest.TempPathFactory) -> LoadSettings:
    folder = write_checkpoint(tmp_path_factory.mktemp("experts") / "model", num_experts=EXPERTS)
    return LoadSettings(model=folder, device="cpu", expert_cache_bytes=1 << 22)


def test_it_loads_its_share_and_serves_what_one_process_computes(load: LoadSettings) -> None:
    exchange_settings = ExchangeSettings(deadline_s=5.0)
    opened = load.open()
    config = opened.config
    held = ((0, 1, 2, 3), (4, 5, 6))
    placed = dict.fromkeys(config.moe_layers, held)
    actors = [ExpertActor(load, exchange_settings) for _ in held]
    sizes = []
    for actor, ids in zip(actors, held, strict=True):
        assert actor.health() == (False, "in no epoch yet")
        sizes.append(actor.load(dict.fromkeys(config.moe_layers, ids)))
        state = actor.progress()
        assert state.done == state.total > 0
    assert sizes[0] * 3 == sizes[1] * 4, "each holds its own experts and no others"

    _store, address = open_store(HOST)
    roster = Roster(5, 1, 2, placed, address)
    joins = [
        threading.Thread(target=actor.join, args=(roster, rank), daemon=True)
        for rank, actor in enumerate(actors, 1)
    ]
    for join in joins:
        join.start()
    exchange = MeshExchange(
        roster, 0, exchange_settings, width=config.latent_size,
        top_k=config.experts_per_token, num_experts=EXPERTS, host=HOST,
    )  # fmt: skip
    for join in joins:
        join.join(10)
    assert [actor.health() for actor in actors] == [(True, ""), (True, "")]

    banks = [
        ExpertBank(
            config, opened.kernels, dict.fromkeys(config.moe_layers, ids), opened.source,
            dtype=opened.dtype, cache_bytes=1 << 22,
        )
        for ids in held
    ]  # fmt: skip
    oracle, rows, top_k = LocalExchange(*banks), 9, config.experts_per_token
    ids_TK = torch.stack([torch.randperm(EXPERTS)[:top_k] for _ in range(rows)])
    z_TD, weights_TK = torch.randn(rows, config.latent_size), torch.rand(rows, top_k)
    exchange.begin_step(rows)
    for layer in config.moe_layers:
        got = exchange.combine(exchange.dispatch(layer, z_TD, ids_TK, weights_TK))
        want = oracle.combine(oracle.dispatch(layer, z_TD, ids_TK, weights_TK))
        assert torch.equal(got, want)
    exchange.end_step()

    stats = [actor.stats() for actor in actors]
    for layer in config.moe_layers:
        for stat, ids in zip(stats, held, strict=True):
            wanted = torch.isin(ids_TK, torch.tensor(ids)).any(1).sum().item()
            assert stat.rows[layer] == wanted, "a row counts once however many experts it wants"
    exchange.close()
    end = time.monotonic() + 5
    while any(actor.health()[0] for actor in actors):
        assert time.monotonic() < end
        time.sleep(0.01)
    assert "ended the epoch" in actors[0].health()[1]
