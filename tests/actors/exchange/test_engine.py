"""A real engine over the mesh, ranks as threads: the same tokens as with all experts at hand."""

import itertools
import threading

import pytest

from expertmesh.actors.attention.engine import Engine
from expertmesh.actors.attention.messages import GenerateRequest, SamplingParams
from expertmesh.actors.attention.settings import EngineSettings
from expertmesh.actors.exchange.base import Exchange, LocalExchange
from expertmesh.actors.exchange.mesh import MeshExchange
from expertmesh.actors.exchange.process_group import open_store
from expertmesh.actors.exchange.roster import Roster
from expertmesh.actors.exchange.serve import MeshServer
from expertmesh.actors.exchange.settings import ExchangeSettings
from expertmesh.actors.experts.bank import ExpertBank
from expertmesh.actors.model.loading import LoadSettings, OpenModel
from expertmesh.actors.model.model import Model
from tests.actors.exchange.toy import HOST, in_threads
from tests.support.checkpoints import write_checkpoint

EXPERTS, ACTORS = 7, 3


@pytest.fixture(scope="module")
def opened(tmp_path_factory: pytest.TempPathFactory) -> OpenModel:
    folder = write_checkpoint(tmp_path_factory.mktemp("mesh") / "model", num_experts=EXPERTS)
    return LoadSettings(model=folder, device="cpu").open()


def generate(
    opened: OpenModel, exchange: Exchange, settings: EngineSettings
) -> dict[str, list[int]]:
    """Six requests, so that prompts and decode rows share steps and micro-batches."""
    model = Model(opened.config, opened.kernels, opened.source, dtype=opened.dtype)
    state = model.new_state(settings.pages, settings.slots)
    engine = Engine(model, state, exchange, settings, opened.config.eos)
    for index in range(6):
        prompt = [(index * 13 + i * 5) % 300 + 1 for i in range(3 + 9 * index)]
        params = SamplingParams(max_tokens=4 + index, temperature=0.0, ignore_eos=True)
        engine.submit(GenerateRequest(f"r{index}", prompt, params))
    tokens: dict[str, list[int]] = {}
    while engine.has_work:
        for output in engine.step():
            assert output.error is None, output.error
            tokens.setdefault(output.request_id, []).extend(output.token_ids)
    return tokens


@pytest.mark.parametrize("layout", ["direct", "exact", "padded", "mixed"])
@pytest.mark.parametrize("ping_pong", [False, True])
def test_tokens_equal_one_process(opened: OpenModel, layout: str, ping_pong: bool) -> None:
    config = opened.config
    cuts = [EXPERTS * actor // ACTORS for actor in range(ACTORS + 1)]
    held = [list(range(begin, end)) for begin, end in itertools.pairwise(cuts)]
    banks = [
        ExpertBank(
            config, opened.kernels, dict.fromkeys(config.moe_layers, ids), opened.source,
            dtype=opened.dtype, cache_bytes=1 << 22,
        )
        for ids in held
    ]  # fmt: skip
    # Chunks too: a prompt step has more rows than one message takes.
    settings = ExchangeSettings(layout=layout, deadline_s=5.0, max_rows=24)
    _store, address = open_store(HOST)
    roster = Roster(0, 1, ACTORS, dict.fromkeys(config.moe_layers, held), address)
    sizes = {"width": config.latent_size, "top_k": config.experts_per_token}

    def attention() -> MeshExchange:
        return MeshExchange(roster, 0, settings, **sizes, num_experts=EXPERTS, host=HOST)

    def expert(actor: int) -> MeshServer:
        bank, dtype = banks[actor], opened.dtype
        return MeshServer(roster, actor + 1, settings, bank, **sizes, dtype=dtype, host=HOST)

    exchange, *servers = in_threads([attention, *(lambda a=a: expert(a) for a in range(ACTORS))])
    threads = [threading.Thread(target=server.run, daemon=True) for server in servers]
    for thread in threads:
        thread.start()
    engine_settings = EngineSettings(pages=64, slots=8, step_tokens=96, ping_pong=ping_pong)
    got = generate(opened, exchange, engine_settings)
    exchange.close()
    for thread in threads:
        thread.join(5)
        assert not thread.is_alive()
    assert got == generate(opened, LocalExchange(*banks), engine_settings)
