"""Two servers: one over a scripted client (protocol tests), one over a tiny real model."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from expertmesh.actors.attention.settings import EngineSettings
from expertmesh.actors.model.loading import LoadSettings
from expertmesh.actors.model.tokenizer import Tokenizer
from expertmesh.deploy.front import Front
from expertmesh.deploy.one_process import LocalServer, start_local
from expertmesh.deploy.openai.app import build_app
from expertmesh.deploy.openai.describe import describe
from expertmesh.deploy.openai.served import Limits, ServedModel
from tests.support.checkpoints import write_checkpoint
from tests.support.door import Door
from tests.support.fake_client import FakeEngineClient, echo_prompt, no_session
from tests.support.http_server import http_server
from tests.support.tokenizers import Vocabulary, write_tokenizer

VOCAB = 320


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """Byte-level, K3's specials in the last 16 of 320 ids; ids 0..255 are the bytes."""
    folder = write_tokenizer(tmp_path_factory.mktemp("tokenizer"), VOCAB)
    loaded = Tokenizer.load(folder, Vocabulary(VOCAB))
    assert loaded is not None
    return loaded


@pytest.fixture(scope="session")
def served(tokenizer: Tokenizer) -> ServedModel:
    return ServedModel("tiny", "/models/tiny", 1024, VOCAB, tokenizer, moe_layers=2, top_k=2)


@pytest.fixture(scope="session")
def fake_server(served: ServedModel) -> Iterator[tuple[FakeEngineClient, str]]:
    client = FakeEngineClient(vocab_size=VOCAB, eos=frozenset({VOCAB - 14}))
    limits = Limits(body_bytes=1 << 20, keep_alive_seconds=0.2, requests=64)
    with http_server(build_app(Front(client, replace(served, limits=limits)))) as url:
        yield client, url


@pytest.fixture
def fake(fake_server: tuple[FakeEngineClient, str]) -> FakeEngineClient:
    """The scripted client, its knobs reset."""
    client = fake_server[0]
    client.script, client.seconds, client.fail_after = echo_prompt, 0.0, None
    client.down, client.refuse, client.gate = "", None, None
    client.cached, client.kv = lambda request: 0, None
    client.answer = no_session
    client.calls.clear()
    client.requests.clear()
    client.aborted.clear()
    return client


@pytest.fixture
def door(fake: FakeEngineClient, fake_server: tuple[FakeEngineClient, str]) -> Iterator[Door]:
    with Door(fake_server[1]) as door:
        yield door


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(
        tmp_path_factory.mktemp("checkpoint") / "tiny", tokenizer=True, num_hidden_layers=4
    )


@pytest.fixture(scope="session")
def local_server(checkpoint: Path) -> Iterator[LocalServer]:
    server = start_local(
        LoadSettings(model=checkpoint), EngineSettings(pages=48, slots=6, step_tokens=128)
    )
    yield server
    server.stop()


@pytest.fixture(scope="session")
def real_url(checkpoint: Path, local_server: LocalServer) -> Iterator[str]:
    info = describe(checkpoint, local_server.config, max_model_len=1024)
    with http_server(build_app(Front(local_server.client, info))) as url:
        yield url


@pytest.fixture
def real(real_url: str, local_server: LocalServer) -> Iterator[Door]:
    """A door to the tiny model. Afterwards the engine must be as empty as before."""
    with Door(real_url) as door:
        before = door.text("The next ordinary request", max_tokens=4, temperature=0)
        yield door
        assert door.text("The next ordinary request", max_tokens=4, temperature=0) == before
        stats = local_server.engine_loop.engine.stats()
        assert (stats.running, stats.waiting) == (0, 0)
        assert (stats.pages_free, stats.slots_free) == (stats.pages_total, stats.slots_total)
