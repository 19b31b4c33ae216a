"""A folder for state behind real engines: for the next server, for a neighbour, and damaged."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from expertmesh.actors.attention.settings import EngineSettings
from expertmesh.actors.model.loading import LoadSettings
from expertmesh.actors.state.settings import StateSettings
from expertmesh.deploy.front import Front
from expertmesh.deploy.one_process import start_local
from expertmesh.deploy.openai.app import build_app
from expertmesh.deploy.openai.describe import describe
from tests.deploy.test_telemetry import samples
from tests.support.door import Door
from tests.support.http_server import http_server
from tests.support.server_process import wait_for

PROMPT = [(7 * i) % 250 for i in range(5 * 64 + 9)]
WHOLE = 5 * 64
ITEMS = 6  # a page for each 64 tokens, and a snapshot at their end
WRITE_S = 60.0


@contextmanager
def serving(checkpoint: Path, folder: Path) -> Iterator[Door]:
    state = StateSettings(disk=folder, disk_bytes=80 << 20)
    settings = EngineSettings(pages=16, slots=2, state=state)
    server = start_local(LoadSettings(model=checkpoint), settings)
    try:
        info = describe(checkpoint, server.config, max_model_len=1024)
        with http_server(build_app(Front(server.client, info))) as url, Door(url) as door:
            yield door
    finally:
        server.stop()


def ask(door: Door) -> tuple[str, int]:
    """The greedy answer, and how much of the prompt was not computed."""
    answer = door.complete(PROMPT, temperature=0, max_tokens=8, ignore_eos=True)
    return answer["choices"][0]["text"], answer["usage"]["prompt_tokens_details"]["cached_tokens"]


def counted(door: Door, name: str) -> dict[str, float]:
    return samples(door.http.get("/metrics").text, name)


def learn(door: Door) -> str:
    """The answer, when the folder has what it took. Asked for twice: that is worth the disk."""
    text, cached = ask(door)
    assert cached == 0 and ask(door) == (text, WHOLE)
    wait_for(lambda: counted(door, "state_tier_items")["0,disk"] >= ITEMS, WRITE_S)
    return text


def test_the_next_server_and_a_neighbour_have_what_one_has_computed(
    checkpoint: Path, tmp_path: Path
) -> None:
    with serving(checkpoint, tmp_path) as first:
        text = learn(first)
        with serving(checkpoint, tmp_path) as neighbour:
            assert ask(neighbour) == (text, WHOLE)
    with serving(checkpoint, tmp_path) as after:
        assert ask(after) == (text, WHOLE)
        assert counted(after, "state_tier_hit_tokens_total")["0,disk"] == WHOLE
        assert sum(counted(after, "state_tier_failures_total").values()) == 0
        assert counted(after, "state_threads_dead") == {"0": 0}


def test_damage_is_computed_again_and_counted(checkpoint: Path, tmp_path: Path) -> None:
    with serving(checkpoint, tmp_path) as door:
        text = learn(door)
    damaged = 0
    for path in tmp_path.rglob("*.seg"):
        data = bytearray(path.read_bytes())
        for at in range(300, len(data), 512):  # behind the headers, within every payload
            data[at] ^= 1
        path.write_bytes(data)
        damaged += 1
    assert damaged
    with serving(checkpoint, tmp_path) as door:
        found, cached = ask(door)
        assert found == text and cached < WHOLE
        assert counted(door, "state_tier_failures_total")["0,corrupt,disk"] > 0
