"""Old pages off the device, on a small model: the same bits, or nearly the same."""

from functools import cache
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from expertmesh.actors.model.batch import NO_PAGE
from expertmesh.actors.model.layers import Mla
from expertmesh.actors.state.offload.context import Offload
from expertmesh.actors.state.offload.opening import offload_of
from expertmesh.actors.state.offload.room import OffloadRoom
from expertmesh.actors.state.settings import StateSettings
from expertmesh.kernels.mla.torch_ops import mla_decode
from tests.support.golden import GOLDEN
from tests.support.latents import RANK, SCALE, correlated, moment, queries
from tests.support.offload import LongText
from tests.support.runner import Runner

PROMPT, ANSWER = 700, 80
NEAR = StateSettings(sink_tokens=64, window_tokens=128)


@cache
def runner() -> Runner:
    return Runner(GOLDEN / "kimi_k3-tiny", slots=2, pages_each=7)


def token_ids(count: int, seed: int = 0) -> list[int]:
    draw = torch.Generator().manual_seed(seed)
    return torch.randint(0, runner().config.vocab_size, (count,), generator=draw).tolist()


def text(mode: str | None, chunk: int = 256, settings: StateSettings = NEAR) -> LongText:
    shared = offload_of(runner().model, settings, fit_pages=4)
    assert shared is not None
    return LongText(runner(), shared, mode, chunk)  # type: ignore[arg-type]


@cache
def expected() -> tuple[Tensor, Tensor]:
    """Logits behind a prompt and of an answer's tokens, with everything on the device."""
    whole = text(None)
    return whole.prompt(token_ids(PROMPT)), whole.forced(token_ids(ANSWER, 1))


@pytest.mark.parametrize("chunk", [64, 192, 256])
def test_offload_gives_the_same_bits(chunk: int) -> None:
    long = text("offload", chunk)
    prompt, answer = long.prompt(token_ids(PROMPT)), long.forced(token_ids(ANSWER, 1))
    assert torch.equal(prompt, expected()[0]) and torch.equal(answer, expected()[1])
    assert long.most <= (64 + 128 + chunk) // 64 + 1  # of 13 pages
    held = [at for at, page in enumerate(long.pages) if page != NO_PAGE]
    assert held == [0, *range((PROMPT + ANSWER - 128) // 64, 13)]
    assert long.context is not None
    assert long.context.host_bytes == (13 - len(held)) * runner().state.page_bytes
    assert long.context.index_bytes == long.context.recent_bytes == 0


@pytest.mark.parametrize("mode", ["offload", "select"])
def test_a_context_fills_what_was_counted_on(mode: str) -> None:
    """Old pages, and of select in 8 bits the base of its estimates."""
    settings = NEAR.model_copy(update={"codec": "int8", "offload_bytes": 1 << 20})
    room = OffloadRoom(settings, runner().state.layout)
    long = text(mode, settings=settings)
    assert long.context is not None
    for begin in range(0, 640, 128):
        long.step(token_ids(128, begin), decode=False)
        assert long.context.host_bytes <= room.far(mode, long.length).nbytes
    most = room.far(mode, 640)
    assert long.context.host_bytes == most.nbytes >= 7 * runner().state.page_bytes
    assert room.far("select", 640).nbytes > room.far("offload", 640).nbytes > 0
    assert room.far("exact", 640).nbytes == 0 and room.ever(most)


def test_select_that_wants_everything_is_all_but_exact() -> None:
    long = text("select", settings=NEAR.model_copy(update={"select_mass": 1.0}))
    assert torch.equal(long.prompt(token_ids(PROMPT)), expected()[0])
    # Other sums of the same numbers; a random model's router makes the most of it.
    torch.testing.assert_close(
        long.forced(token_ids(ANSWER, 1)), expected()[1], rtol=0.05, atol=1e-3
    )
    assert long.context is not None
    reading = long.context.reading
    assert reading.estimated_pages == 0 and reading.estimated_share == 0.0
    assert reading.loaded_pages < 0.1 * reading.read_pages  # the others were still there


def test_select_estimates_what_it_does_not_read() -> None:
    few = NEAR.model_copy(update={"select_mass": 0.5, "select_pages": 4})
    long = text("select", settings=few)
    assert torch.equal(long.prompt(token_ids(PROMPT)), expected()[0])
    assert not torch.equal(long.forced(token_ids(ANSWER, 1)), expected()[1])
    assert long.context is not None
    reading, layers = long.context.reading, len(runner().config.mla_layers)
    assert reading.read_pages == 4 * ANSWER * layers
    assert reading.estimated_pages > reading.read_pages
    assert 0.1 < reading.estimated_share < 1
    assert 0 < long.context.recent_bytes <= 4 * runner().state.page_bytes
    kept = [page for recent in long.context._recent for page in recent.values()]
    assert all(page.untyped_storage().nbytes() == page.nbytes for page in kept)  # no view of more
    assert long.context.index_bytes > 0 and 0 < reading.bits < 32


def test_select_does_not_depend_on_how_the_prompt_was_cut() -> None:
    few = NEAR.model_copy(update={"select_pages": 5})
    answers = []
    for chunk in (64, 256):
        long = text("select", chunk, few)
        long.prompt(token_ids(PROMPT))
        answers.append(long.forced(token_ids(20, 1)))
    assert torch.equal(*answers)


@pytest.mark.parametrize(("most", "error"), [(1, 0.12), (4, 0.08), (30, 1e-5)])
def test_one_query_against_exact_attention(most: int, error: float) -> None:
    """The more pages are read exactly, the better."""
    rows, heads, pages = correlated(30), 3, list(range(30))
    settings = NEAR.model_copy(update={"select_pages": most, "select_mass": 1.0})
    shared = Offload(settings, RANK, SCALE, mla_decode, lambda: [moment()], fit_pages=16)
    context, cache = shared.context("select"), rows.clone()
    for page in context.leave(cache.unsqueeze(0), pages, len(rows)):
        cache[page * 64 : page * 64 + 64] = float("nan")
    for seed in range(8):
        q = queries(heads, seed)
        weights = (q @ rows.T * SCALE).softmax(dim=1)
        expected = weights @ rows[:, :RANK]
        found = context.decode(0, q, cache, pages, len(rows), SCALE)
        assert (found - expected).norm() < error * expected.norm()


@pytest.mark.parametrize("mass", [0.5, 1.0])
def test_a_base_certifies_or_all_is_read(mass: float) -> None:
    rows, pages = correlated(30), list(range(30))
    settings = NEAR.model_copy(update={"codec": "int8", "select_mass": mass, "select_pages": 4})
    shared = Offload(settings, RANK, SCALE, mla_decode, fit_pages=16)
    certified, whole = shared.context("select"), shared.context("offload")
    whole.leave(rows.unsqueeze(0), list(pages), len(rows))
    certified.leave(rows.unsqueeze(0), pages, len(rows))
    assert certified.index_bytes == 0  # the base is in host memory
    assert certified.host_bytes > whole.host_bytes
    for seed in range(4):
        q = queries(3, seed) * 0.2
        found = certified.decode(0, q, rows, pages, len(rows), SCALE)
        expected = whole.decode(0, q, rows, pages, len(rows), SCALE)
        reading = certified.reading
        if mass == 1.0:  # nothing short of everything is good enough
            assert torch.equal(found, expected) and reading.estimated_pages == 0
            assert reading.bound == 0.0
        else:
            away = (found - expected).norm(dim=1) / found.norm(dim=1)
            assert 0 < float(away.max()) <= reading.bound <= 0.5
            assert reading.estimated_pages > 0 and reading.bits == 8.0


def test_nothing_has_left_and_nothing_is_estimated() -> None:
    for mode in ("offload", "select"):
        long = text(mode)
        found = long.prompt(token_ids(190, 3)), long.forced(token_ids(3, 4))
        whole = text(None)
        assert torch.equal(found[0], whole.prompt(token_ids(190, 3)))
        assert torch.equal(found[1], whole.forced(token_ids(3, 4)))
        assert long.context is not None and long.context.host_bytes == 0


def test_pages_leave_one_by_one_and_in_order() -> None:
    context = text("offload").context
    assert context is not None
    seen: list[int] = []
    for computed in range(0, 640, 16):
        leaving = context.leaving(computed)
        seen += leaving
        pages = list(range(10))
        gone = context.leave(runner().state.latents, pages, computed)
        assert gone == list(leaving) and all(pages[at] == NO_PAGE for at in gone)
    assert seen == [1, 2, 3, 4, 5, 6]  # of 624 - 128 tokens, but for the sinks
    assert all(b - a == 1 for a, b in pairwise(seen))


def test_the_moment_of_queries_is_that_of_unit_inputs() -> None:
    layer = next(one for one in runner().model.attention if isinstance(one, Mla))
    assert layer.q_norm is not None and layer.q_up is not None
    rank = layer.q_norm.shape[0]
    draw = torch.randn(40_000, rank, generator=torch.Generator().manual_seed(0))
    q = layer.q_up(draw * layer.q_norm).view(len(draw), layer.heads, -1)
    q_n, q_r = q.split([layer.nope, layer.rope], dim=2)
    absorbed = torch.cat([torch.einsum("thd,hdr->thr", q_n, layer.w_k_HdR), q_r], dim=2)
    found = torch.einsum("thc,thd->cd", absorbed, absorbed) / len(draw) / layer.heads
    moment = layer.query_moment()
    assert (found - moment).norm() < 0.05 * moment.norm()
