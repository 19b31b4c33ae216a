from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from expertmesh.kernels.cases import Case, Make
from expertmesh.kernels.launch import recording
from expertmesh.kernels.mla import reference, torch_ops, triton_ops
from expertmesh.kernels.mla.cases import CASES
from expertmesh.kernels.mla.types import PAGE
from tests.kernels.checks import assert_close, randn
from tests.kernels.triton_checks import HUGE, assert_bf16_close, assert_fence, fenced, spread

SCALE = 0.3
Inputs = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, float]


def inputs(
    lengths: Sequence[int],
    heads: int,
    rank: int,
    rope: int,
    spare: int = 1,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
) -> Inputs:
    """Sequences in shuffled pages of one cache: all that must not be read is huge, NaN or a page
    number far outside. Queries lie as the model passes them."""
    counts = [-(-length // PAGE) for length in lengths]
    order = torch.randperm(sum(counts), generator=torch.Generator().manual_seed(seed)).tolist()
    cache = torch.full((sum(counts) * PAGE, rank + rope), float("nan"), dtype=dtype)
    table = torch.full((len(lengths), max(counts) + spare), 2**40)
    for row, (length, count) in enumerate(zip(lengths, counts, strict=True)):
        numbers = torch.randn(length, rank + rope, generator=torch.Generator().manual_seed(row))
        for n in range(count):
            page = table[row, n] = order.pop()
            used = numbers[n * PAGE : (n + 1) * PAGE]
            cache[page * PAGE : page * PAGE + len(used)] = used.to(dtype)
    q_latent = spread(randn(heads, len(lengths), rank, seed=seed + 1).to(dtype)).transpose(0, 1)
    q_rope = spread(randn(len(lengths), heads, rope, seed=seed + 2).to(dtype), axis=1)
    return q_latent, q_rope, fenced(cache, HUGE), spread(table), torch.tensor(lengths), SCALE


def exactly(args: Inputs) -> Tensor:
    """The definition, on the same numbers in float32."""
    q_latent, q_rope, cache, *rest = args
    return reference.mla_decode(q_latent.float(), q_rope.float(), cache.float(), *rest)


@pytest.mark.parametrize(
    ("lengths", "heads", "rank", "rope"),
    [([1, 64, 65, 130], 3, 24, 5), ([63, 0, 7], 17, 32, 8), ([0, 0], 2, 8, 4), ([200], 1, 3, 16)],
)
def test_decode(lengths: list[int], heads: int, rank: int, rope: int) -> None:
    args = inputs(lengths, heads, rank, rope)
    got = triton_ops.mla_decode(*args)
    assert_close(got, exactly(args))
    assert (got[torch.tensor(lengths) == 0] == 0).all()


def test_operands_whose_elements_lie_apart() -> None:
    q_latent, q_rope, cache, table, lengths, scale = inputs([70, 5], 3, 16, 4)
    apart = (spread(x, axis=-1) for x in (q_latent, q_rope, table, lengths))
    latent, rope, pages, count = apart
    got = triton_ops.mla_decode(latent, rope, cache, pages, count, scale)
    assert_close(got, exactly((q_latent, q_rope, cache, table, lengths, scale)))
    values, gate = randn(3, 35), randn(3, 35, seed=1)
    got = triton_ops.output_gate(spread(values, axis=-1), spread(gate, axis=-1))
    assert_close(got, reference.output_gate(values, gate))


def test_decode_of_more_heads_than_a_tile_has() -> None:
    args = inputs([70, 5], 96, 16, 4)
    assert_close(triton_ops.mla_decode(*args), exactly(args))


def test_decode_in_splits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Short ones, so that a long row has equal splits, longer ones, and a second group of them."""
    monkeypatch.setattr(triton_ops, "SPLIT", PAGE)
    monkeypatch.setattr(triton_ops, "EQUAL", 4)
    lengths = [600, 64, 65, 0, 257]
    args = inputs(lengths, 3, 16, 4, spare=2)
    got = triton_ops.mla_decode(*args)
    assert_close(got, torch_ops.mla_decode(*args[:3], args[3] % 2**40, *args[4:]))
    assert_close(got[1:], exactly(select(args, [1, 2, 3, 4])))
    # Neither companions nor the width of the table change a bit.
    for rows in ([4, 0], [2, 3, 1]):
        alone = triton_ops.mla_decode(*select(args, rows))
        assert torch.equal(alone, got[rows])
        longest = -(-max(lengths[row] for row in rows) // PAGE)
        narrow = triton_ops.mla_decode(*select(args, rows, pages=longest))
        assert torch.equal(narrow, alone)


def select(args: Inputs, rows: list[int], pages: int | None = None) -> Inputs:
    q_latent, q_rope, cache, table, lengths, scale = args
    return q_latent[rows], q_rope[rows], cache, table[rows, :pages], lengths[rows], scale


def test_splits_cover_a_context_in_order() -> None:
    edges = [0]
    octave = triton_ops.EQUAL // 2
    for split in range(96):
        size = triton_ops.SPLIT << max(0, split // octave - 1)
        assert triton_ops.splits_of(edges[-1] + 1) == split + 1
        edges.append(edges[-1] + size)
        assert triton_ops.splits_of(edges[-1]) == split + 1
    assert edges[-1] == 1 << 20 and triton_ops.splits_of(0) == 0


def test_decode_with_one_huge_score() -> None:
    q_latent, *rest = inputs([130, 64], 2, 16, 8)
    args = (q_latent * 1e4, *rest)
    assert_close(triton_ops.mla_decode(*args), exactly(args))


@pytest.mark.parametrize("split", [triton_ops.SPLIT, PAGE])
def test_decode_in_bf16(split: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two roundings: of the weights, whose errors add up to at most 2^-9 of the weighted absolute
    latents, and of the result."""
    monkeypatch.setattr(triton_ops, "SPLIT", split)
    args = inputs([130, 0, 65], 3, 32, 8, dtype=torch.bfloat16)
    got = triton_ops.mla_decode(*args)
    assert got.dtype == torch.bfloat16 and not got.isnan().any()
    q_latent, q_rope, cache, table, lengths, scale = args
    exact = exactly(args)
    weighted = cache.float()
    # Scores as they are, values made absolute: twice the rank, queried by its first half alone.
    doubled = torch.cat([weighted[:, :32], weighted[:, :32].abs(), weighted[:, 32:]], dim=1)
    query = torch.cat([q_latent.float(), torch.zeros_like(q_latent.float())], dim=2)
    size = reference.mla_decode(query, q_rope.float(), doubled, table, lengths, scale)[:, :, 32:]
    assert bool(((got.float() - exact).abs() <= 2**-9 * (size + exact.abs()) + 1e-6).all())


def test_decode_writes_nothing_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    args = inputs([65, 3], 3, 24, 5)
    made: list[Tensor] = []

    def empty(*shape: int, **kwargs: object) -> Tensor:
        made.append(fenced(torch.zeros(*shape).fill_(float("nan"))))
        return made[-1]

    monkeypatch.setattr(triton_ops.torch, "empty", empty)
    monkeypatch.setattr(triton_ops, "SPLIT", PAGE)
    triton_ops.mla_decode(*args)
    for tensor in (*made, args[2]):
        assert_fence(tensor)


def test_a_step_needs_no_plan() -> None:
    assert triton_ops.mla_plan(torch.zeros(2, 3), torch.ones(2)) is None


@pytest.mark.parametrize(("rows", "width"), [(3, 35), (1, 1), (2, 1500), (0, 8)])
def test_output_gate(rows: int, width: int) -> None:
    values = spread(randn(rows, width))
    gate = spread(randn(rows, width, seed=1) * 20)
    got = triton_ops.output_gate(values, gate)
    assert_close(got, reference.output_gate(values, gate))
    values, gate = spread(values.bfloat16()), spread(gate.bfloat16())
    exact = values.float() * torch.sigmoid(gate.float()).bfloat16().float()
    assert_bf16_close(triton_ops.output_gate(values, gate), exact)


@pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])
def test_work_is_every_operand_once(case: Case) -> None:
    """What splits leave for the second kernel is the kernel's own affair and not counted."""
    with recording() as launches:
        getattr(triton_ops, case.operator)(*case.arguments(Make()))
    tensors = [one for one in launches[0].arguments if isinstance(one, Tensor)]
    counted = [one for one in tensors if one.dtype != torch.float32]
    assert case.work.bytes == sum(one.nbytes for one in counted)
