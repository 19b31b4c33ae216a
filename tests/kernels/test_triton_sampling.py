import pytest
import torch
from torch import Tensor

from expertmesh.kernels.cases import Case, Make
from expertmesh.kernels.launch import recording
from expertmesh.kernels.sampling import reference, torch_ops, triton_ops
from expertmesh.kernels.sampling.cases import CASES
from tests.kernels.checks import randn, random_settings
from tests.kernels.triton_checks import assert_fence, fenced, spread

NEG = float("-inf")
Settings = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]


def settings(*rows: tuple[float, int, float, float, float]) -> Settings:
    """temperature, top_k, top_p, min_p, uniform of each row."""
    heat, top_k, top_p, min_p, uniform = zip(*rows, strict=True)
    return (
        torch.tensor(heat),
        torch.tensor(top_k, dtype=torch.int64),
        torch.tensor(top_p),
        torch.tensor(min_p),
        torch.tensor(uniform, dtype=torch.float64),
    )


@pytest.mark.parametrize(("vocabulary", "seed"), [(1, 0), (7, 1), (64, 2), (201, 3), (201, 4)])
def test_sample_matches_the_definition(vocabulary: int, seed: int) -> None:
    logits = fenced(randn(6, vocabulary, seed=seed) * 3)
    chosen = random_settings(6, vocabulary, seed)
    got = triton_ops.sample(logits, *chosen)
    assert got.dtype == torch.int64
    assert torch.equal(got, reference.sample(logits, *chosen))


@pytest.mark.parametrize("seed", range(2))
def test_ties_and_masked_ids(seed: int) -> None:
    """Few distinct logits, many -inf: the rules for ties, and a masked id is never drawn."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randint(0, 3, (6, 29), generator=generator).float() * 2
    logits.masked_fill_(torch.rand(logits.shape, generator=generator) < 0.4, NEG)
    logits[:, seed] = 1.0
    chosen = random_settings(6, 29, seed)
    got = triton_ops.sample(logits, *chosen)
    assert torch.equal(got, reference.sample(logits, *chosen))
    assert logits.gather(1, got.unsqueeze(1)).isfinite().all()


def test_rows_without_a_draw() -> None:
    """Cold ones and those without a finite maximum: the lowest id of the largest logit."""
    logits = torch.zeros(8, 5)
    logits[0], logits[1, 3:], logits[2, 2:] = NEG, float("inf"), float("nan")
    logits[3, 1:], logits[4, ::2] = 7.0, -0.0
    logits[5], logits[6, 3], logits[7] = NEG, float("nan"), -1e30
    logits[6, 1] = float("inf")
    for finite in (0.0, 9e-6):  # rows with a finite maximum are cold, of the others half are
        heat = [finite if row in (3, 4, 7) else float(row % 2) for row in range(8)]
        got = triton_ops.sample(logits, *settings(*[(t, 2, 0.5, 0.1, 0.99) for t in heat]))
        assert got.tolist() == [0, 3, 2, 1, 0, 0, 3, 0]


def test_the_coldest_row_that_draws_is_the_hosts() -> None:
    """float32(1e-5) is below 1e-5, the next one is not."""
    cold = torch.tensor(torch_ops.GREEDY_BELOW)
    heat = torch.stack([cold, cold.nextafter(torch.tensor(1.0))])
    _, *filters = settings(*[(0.0, -1, 1.0, 0.0, 0.9)] * 2)
    logits = torch.zeros(2, 4)
    got = triton_ops.sample(logits, heat, *filters)
    assert got.tolist() == torch_ops.sample(logits, heat, *filters).tolist() == [0, 3]


def test_filters_keep_what_they_should() -> None:
    logits = torch.tensor([0.4, 0.3, 0.2, 0.1]).log()
    off = (-1, 1.0, 0.0)
    kept = [
        (off, [0, 1, 2, 3]),
        ((2, 1.0, 0.0), [0, 1]),
        ((-1, 0.69, 0.0), [0, 1]),
        ((-1, 0.71, 0.0), [0, 1, 2]),
        ((-1, 0.0, 0.0), [0]),
        ((-1, 1.0, 0.6), [0, 1]),
        ((-1, 1.0, 1.0), [0]),
        ((2, 0.55, 0.0), [0]),  # top_p sees what top_k left: 0.4 / 0.7 alone reaches 0.55
    ]
    for filters, ids in kept:
        rows = [(1.0, *filters, uniform) for uniform in (0.0, 0.5, 0.8, 1 - 2**-53)]
        got = triton_ops.sample(logits.expand(len(rows), -1), *settings(*rows))
        assert sorted(set(got.tolist())) == ids, filters


def test_weights_a_few_roundings_apart_are_told_apart() -> None:
    """The search must not end while two weights are left inside its interval."""
    logits = torch.arange(5) * -4e-7
    kept = [(k, 1.0) for k in range(1, 6)] + [(-1, (k - 0.5) / 5) for k in range(1, 6)]
    last = settings(*[(1.0, *filters, 0.0, 1 - 2**-53) for filters in kept])
    got = triton_ops.sample(logits.expand(len(kept), -1), *last)
    assert got.tolist() == [0, 1, 2, 3, 4] * 2


@pytest.mark.parametrize("uniform", [0.0, 1 - 2**-53, 1.0])
def test_the_ends_of_the_unit_interval_stay_inside(uniform: float) -> None:
    logits = torch.full((3, 70), NEG)
    logits[0, 5:9], logits[1, -1], logits[2, 0] = 0.0, 0.0, 0.0
    got = triton_ops.sample(logits, *settings(*[(1.0, -1, 1.0, 0.0, uniform)] * 3))
    assert got.tolist() == [5 if uniform == 0 else 8, 69, 0]


def test_several_blocks_strided_rows_and_companions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_ops, "BLOCK", 128)
    logits = spread(randn(4, 300) * 2)
    logits[3, 260:] += 9
    chosen = settings(
        (0.8, 40, 0.9, 0.0, 0.3), (1.0, -1, 0.95, 0.0, 0.999),
        (1.2, 150, 1.0, 0.01, 0.6), (1.0, -1, 1.0, 0.0, 0.5),
    )  # fmt: skip
    got = triton_ops.sample(logits, *chosen)
    assert torch.equal(got, torch_ops.sample(logits, *chosen))
    order = torch.tensor([2, 0])
    some = triton_ops.sample(logits[order], *(x[order] for x in chosen))
    assert torch.equal(some, got[order])


def test_elements_that_lie_apart() -> None:
    logits, chosen = randn(4, 50) * 4, random_settings(4, 50, 6)
    got = triton_ops.sample(spread(logits, -1), *(spread(x, -1) for x in chosen))
    assert torch.equal(got, reference.sample(logits, *chosen))


def test_bf16_logits() -> None:
    logits = spread((randn(4, 50) * 4).bfloat16())
    chosen = random_settings(4, 50, 5)
    got = triton_ops.sample(logits, *chosen)
    assert torch.equal(got, reference.sample(logits, *chosen))


def test_no_row_and_nothing_written_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Tensor] = []

    def empty(rows: int, **kwargs: object) -> Tensor:
        made.append(fenced(torch.full((rows,), -7)))
        return made[-1]

    monkeypatch.setattr(triton_ops.torch, "empty", empty)
    assert triton_ops.sample(randn(0, 9), *random_settings(0, 9, 0)).tolist() == []
    assert triton_ops.sample(randn(1, 9), *settings((0.0, 1, 1.0, 0.0, 0.5))).shape == (1,)
    for tensor in made:
        assert_fence(tensor)


@pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])
def test_work_is_every_operand_once(case: Case) -> None:
    with recording() as launches:
        triton_ops.sample(*case.arguments(Make()))
    (launch,) = launches
    tensors = [one for one in launch.arguments if isinstance(one, Tensor)]
    assert case.work.bytes == sum(one.nbytes for one in tensors)
