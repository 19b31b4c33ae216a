"""The model against golden logits, and against itself: chunked, token by token, batched, split."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from expertmesh.actors.model.model import RoutingTrace
from tests.support.checkpoints import write_checkpoint
from tests.support.golden import GOLDEN
from tests.support.runner import Runner

TOLERANCE = {"kimi_k3-tiny": (2e-2, 1e-4), "kimi_linear-tiny": (1e-4, 1e-4)}  # max, median


@pytest.fixture(params=sorted(TOLERANCE))
def golden(request: pytest.FixtureRequest) -> tuple[Path, dict, torch.Tensor]:
    folder = GOLDEN / request.param
    expected = json.loads((folder / "expected.json").read_text())
    return folder, expected, load_file(folder / "expected-logits.safetensors")["logits"]


def assert_close(logits: torch.Tensor, expected: torch.Tensor, name: str) -> None:
    most, median = TOLERANCE[name]
    gap = (logits - expected).abs()
    assert gap.max() <= most
    assert gap.median() <= median


@pytest.mark.parametrize("backend", ["auto", "reference"])
@pytest.mark.parametrize("banks", [1, 2, 3])
def test_golden(golden: tuple[Path, dict, torch.Tensor], backend: str, banks: int) -> None:
    folder, expected, logits_TV = golden
    runner = Runner(folder, banks=banks, backend=backend)
    trace = RoutingTrace()
    logits = runner.step([(0, expected["prompt_ids"], False)], trace)
    assert_close(logits, logits_TV, folder.name)
    for layer, rows in expected["routed_experts"].items():
        assert trace.layers[int(layer)].tolist() == rows
    assert runner.greedy(0, logits[-1], 24) == expected["greedy_ids"]


@pytest.mark.parametrize("chunk", [1, 7, 64, 65])
def test_golden_in_chunks(golden: tuple[Path, dict, torch.Tensor], chunk: int) -> None:
    folder, expected, logits_TV = golden
    runner = Runner(folder)
    logits = runner.prefill(0, expected["prompt_ids"], chunk)
    assert_close(logits, logits_TV, folder.name)
    assert runner.greedy(0, logits[-1], 24) == expected["greedy_ids"]


def test_golden_prefill_then_single_steps(golden: tuple[Path, dict, torch.Tensor]) -> None:
    folder, expected, logits_TV = golden
    runner, ids = Runner(folder), expected["prompt_ids"]
    rows = [runner.step([(0, ids[:9], False)])]
    rows += [runner.step([(0, [token], True)]) for token in ids[9:]]
    assert_close(torch.cat(rows), logits_TV, folder.name)


@pytest.fixture(scope="module", params=["kimi_k3", "kimi_linear"])
def odd_model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp(request.param)
    return write_checkpoint(folder, family=request.param, shards=3, vocab_size=331, num_experts=7)


def prompt(length: int, seed: int, vocab: int = 331) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, vocab, (length,), generator=generator).tolist()


def test_grid_chunks_are_bit_exact_and_others_within_noise(odd_model: Path) -> None:
    runner, ids = Runner(odd_model, pages_each=8), prompt(200, 1)
    whole = runner.prefill(0, ids)
    state = [t.clone() for t in (runner.state.kda[:, 0], runner.state.conv[:, 0])]
    for chunk, exact in [(64, True), (128, True), (1, False), (7, False), (65, False)]:
        runner.reset(0)
        logits = runner.prefill(0, ids, chunk)
        if exact:
            assert torch.equal(logits, whole)
            assert torch.equal(runner.state.kda[:, 0], state[0])
            assert torch.equal(runner.state.conv[:, 0], state[1])
        torch.testing.assert_close(logits, whole, atol=1e-4, rtol=0)
        assert torch.equal(logits.argmax(-1), whole.argmax(-1))


def test_rows_do_not_depend_on_their_batch(odd_model: Path) -> None:
    """Decodes and prefills of five sequences in one step have the bits of each alone."""
    prompts = [prompt(n, n) for n in (3, 64, 65, 130, 1)]
    alone = Runner(odd_model, slots=5)
    expected = []
    for slot, ids in enumerate(prompts):
        first = alone.prefill(slot, ids)
        expected.append((first, alone.step([(slot, [5], True)]), alone.step([(slot, [9], True)])))
    together = Runner(odd_model, slots=5)
    for slot in (0, 1, 2):
        assert torch.equal(together.prefill(slot, prompts[slot]), expected[slot][0])
    mixed = together.step(
        [
            (0, [5], True),
            (1, [5], True),
            (2, [5], True),
            (3, prompts[3], False),
            (4, prompts[4], False),
        ]
    )
    rows = [(0, 1, expected[0][1]), (1, 2, expected[1][1]), (2, 3, expected[2][1])]
    rows += [(3, 133, expected[3][0]), (133, 134, expected[4][0])]
    for begin, end, logits in rows:
        assert torch.equal(mixed[begin:end], logits)
    together.step([(3, [5], True), (4, [5], True)])
    final = together.step([(slot, [9], True) for slot in range(5)])
    for slot in range(5):
        assert torch.equal(final[slot], expected[slot][2][0])


def test_ping_pong_has_the_bits_of_the_plain_loop(odd_model: Path) -> None:
    work = [(0, prompt(70, 3), False), (1, prompt(5, 4), False), (2, prompt(33, 5), False)]
    plain, split = Runner(odd_model), Runner(odd_model)
    assert torch.equal(plain.step(work), split.step(work, ping_pong=True))
    decodes = [(0, [7], True), (1, [8], True), (2, [9], True)]
    assert torch.equal(plain.step(decodes), split.step(decodes, ping_pong=True))


def test_a_bounded_expert_cache_changes_nothing(odd_model: Path) -> None:
    ids = prompt(20, 6)
    full, none = Runner(odd_model), Runner(odd_model, cache_bytes=0)
    assert torch.equal(full.prefill(0, ids), none.prefill(0, ids))
    assert none.banks[0].cached_bytes == 0 < full.banks[0].cached_bytes


def test_unwritten_memory_never_reaches_a_result(odd_model: Path) -> None:
    """Other slots and pages hold NaN: what a recycled buffer may contain (E9, D1)."""
    clean, poisoned = Runner(odd_model), Runner(odd_model)
    for tensor in poisoned.state.tensors():
        tensor.fill_(float("nan"))
    poisoned.reset(0)
    ids = prompt(70, 8)
    assert torch.equal(clean.prefill(0, ids), poisoned.prefill(0, ids))
    assert torch.equal(clean.step([(0, [4], True)]), poisoned.step([(0, [4], True)]))
