"""Sampling from logits on a GPU: one program per row, without a sort.

The smallest weight that a filter keeps is found by narrowing an interval of float32 bit patterns:
a pass over the row sums what lies at or above three values inside it, so each takes two of thirty
bits, and it ends when one weight is left inside. All passes but the first read the row from the
GPU's cache. A greedy row takes one pass, one that draws without filters two.
"""

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from expertmesh.kernels.launch import blocks, dense_rows, launch, power_of_two
from expertmesh.kernels.sampling.torch_ops import GREEDY_BELOW

LOG2_E = 1.4426950408889634
BLOCK = 4096  # ids at a time
STAGES = 3  # blocks on their way at a time
# The smallest float32 that is not below the bound. Triton would round the bound to float32, which
# takes it down.
LEAST_HEAT = float(np.nextafter(np.float32(GREEDY_BELOW), np.float32(1.0)))

__all__ = ["sample"]


@triton.jit
def _of_key(key):
    """int32 keys in the order of floats <-> a float's bits: the same function both ways."""
    return tl.where(key < 0, key ^ 0x7FFFFFFF, key)


@triton.jit
def _largest(logits, VOCABULARY: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr):
    """Key of a row's largest logit, and the lowest id that has it. NaN is larger than all."""
    b_best = tl.full([BLOCK], -0x80000000, tl.int32)
    b_id = tl.zeros([BLOCK], tl.int32)
    for first in tl.range(0, VOCABULARY, BLOCK, num_stages=STAGES):
        number = first + tl.arange(0, BLOCK)
        inside = number < VOCABULARY
        b_x = tl.load(logits + number, mask=inside, other=float("-inf")).to(tl.float32)
        b_key = tl.where(b_x == 0.0, 0, _of_key(b_x.to(tl.int32, bitcast=True)))  # -0 equals 0
        b_key = tl.where(b_x != b_x, 0x7FFFFFFF, b_key)
        better = inside & (b_key > b_best)
        b_best = tl.where(better, b_key, b_best)
        b_id = tl.where(better, number, b_id)
    best = tl.max(b_best, 0)
    return best, tl.min(tl.where(b_best == best, b_id, VOCABULARY), 0)


@triton.jit
def _weights(logits, number, VOCABULARY: tl.constexpr, peak, rate):
    """exp((logit - peak) / temperature): exactly 1 for the largest, 0 behind the vocabulary."""
    b_x = tl.load(logits + number, mask=number < VOCABULARY, other=float("-inf"))
    return tl.exp2((b_x.to(tl.float32) - peak) * rate)


@triton.jit
def _kept(b_w, edge):
    """float64 weights, 0 below the edge (a float32's bits: those of positive ones are ordered)."""
    return tl.where(b_w.to(tl.int32, bitcast=True) >= edge, b_w.to(tl.float64), 0.0)


@triton.jit
def _kept_sum(
    logits, VOCABULARY: tl.constexpr, peak, rate, edge, BLOCK: tl.constexpr, STAGES: tl.constexpr
):
    b_sum = tl.zeros([BLOCK], tl.float64)
    for first in tl.range(0, VOCABULARY, BLOCK, num_stages=STAGES):
        b_w = _weights(logits, first + tl.arange(0, BLOCK), VOCABULARY, peak, rate)
        b_sum += _kept(b_w, edge)
    return tl.sum(b_sum, 0)


@triton.jit
def _edge(
    logits, VOCABULARY: tl.constexpr, peak, rate, low, at_low, goal,
    COUNT: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """An edge at or above which lies at least `goal`, and less above the next weight: so many
    weights (COUNT) or weights of that sum. At or above `low` lies `at_low` >= goal > 0."""
    KIND: tl.constexpr = tl.int32 if COUNT else tl.float64
    high = tl.full([], 0x3F800001, tl.int32)  # behind the bits of 1
    at_high = tl.full([], 0.0, tl.float64)
    span = high - low
    while span > 1:
        step = tl.maximum(span // 4, 1)
        one = low + step
        two, three = tl.minimum(low + 2 * step, high), tl.minimum(low + 3 * step, high)
        b_one = tl.zeros([BLOCK], KIND)
        b_two = tl.zeros([BLOCK], KIND)
        b_three = tl.zeros([BLOCK], KIND)
        for first in tl.range(0, VOCABULARY, BLOCK, num_stages=STAGES):
            b_w = _weights(logits, first + tl.arange(0, BLOCK), VOCABULARY, peak, rate)
            b_bits = b_w.to(tl.int32, bitcast=True)
            b_measure = tl.full([BLOCK], 1, KIND) if COUNT else b_w.to(KIND)
            b_one += tl.where(b_bits >= one, b_measure, 0)
            b_two += tl.where(b_bits >= two, b_measure, 0)
            b_three += tl.where(b_bits >= three, b_measure, 0)
        at_one = tl.sum(b_one, 0).to(tl.float64)
        at_two = tl.sum(b_two, 0).to(tl.float64)
        at_three = tl.sum(b_three, 0).to(tl.float64)
        if at_three >= goal:
            low, at_low = three, at_three
        elif at_two >= goal:
            low, at_low, high, at_high = two, at_two, three, at_three
        elif at_one >= goal:
            low, at_low, high, at_high = one, at_one, two, at_two
        else:
            high, at_high = one, at_one
        # Two weights inside would make this much at least; a quarter less leaves room for rounding.
        if COUNT:
            two_inside = tl.full([], 1.5, tl.float64)
        else:
            two_inside = 1.5 * low.to(tl.float32, bitcast=True).to(tl.float64)
        span = tl.where(at_low - at_high < two_inside, 0, high - low)
    return low


@triton.jit
def _first_above(b_reached, b_parts, target, SIZE: tl.constexpr):
    """Index of the first positive part whose running sum exceeds target, else the last positive
    one: parallel running sums may be off by a rounding."""
    index = tl.arange(0, SIZE)
    found = tl.min(tl.where((b_reached > target) & (b_parts > 0.0), index, SIZE), 0)
    return tl.where(found < SIZE, found, tl.max(tl.where(b_parts > 0.0, index, 0), 0))


@triton.jit
def _inverse_cdf(
    logits, VOCABULARY: tl.constexpr, peak, rate, edge, uniform,
    BLOCKS: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """First id whose cumulative weight exceeds uniform * total: its block, then its place in it."""
    column = tl.arange(0, BLOCK)
    number = tl.arange(0, BLOCKS)
    b_sums = tl.zeros([BLOCKS], tl.float64)
    for first in tl.range(0, VOCABULARY, BLOCK, num_stages=STAGES):
        b_w = _kept(_weights(logits, first + column, VOCABULARY, peak, rate), edge)
        b_sums = tl.where(number == first // BLOCK, tl.sum(b_w, 0), b_sums)
    b_reached = tl.cumsum(b_sums, 0)
    total = tl.max(b_reached, 0)
    # Strictly below the total, whatever the product rounds to: 2^-52 of it is an ulp at least.
    target = tl.minimum(uniform * total, total - total * 2.220446049250313e-16)
    block = _first_above(b_reached, b_sums, target, BLOCKS)
    target -= tl.sum(tl.where(number == block - 1, b_reached, 0.0), 0)
    b_w = _kept(_weights(logits, block * BLOCK + column, VOCABULARY, peak, rate), edge)
    return block * BLOCK + _first_above(tl.cumsum(b_w, 0), b_w, target, BLOCK)


@triton.jit
def sample_kernel(
    logits, temperature, top_k, top_p, min_p, uniform, out, stride,
    VOCABULARY: tl.constexpr, LEAST_HEAT: tl.constexpr, LOG2_E: tl.constexpr,
    BLOCKS: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    logits += row * stride
    heat = tl.load(temperature + row).to(tl.float32)
    key, chosen = _largest(logits, VOCABULARY, BLOCK, STAGES)
    # Between the keys of -inf and +inf.
    finite = (key > -0x7F800001) & (key < 0x7F800000)
    if finite & (heat >= LEAST_HEAT):
        peak = _of_key(key).to(tl.float32, bitcast=True)
        rate = LOG2_E / heat
        edge = tl.full([], 0, tl.int32)
        most = tl.load(top_k + row)
        if (most > 0) & (most < VOCABULARY):
            every = tl.full([], VOCABULARY, tl.float64)
            edge = _edge(
                logits, VOCABULARY, peak, rate, edge, every, most.to(tl.float64), True, BLOCK,
                STAGES,
            )  # fmt: skip
        share = tl.load(top_p + row).to(tl.float64)
        if share < 1.0:
            total = _kept_sum(logits, VOCABULARY, peak, rate, edge, BLOCK, STAGES)
            goal = tl.maximum(share * total, 1e-30)  # of nothing: the largest alone
            edge = _edge(
                logits, VOCABULARY, peak, rate, edge, total, goal, False, BLOCK, STAGES
            )  # fmt: skip
        least = tl.load(min_p + row).to(tl.float32).to(tl.int32, bitcast=True)
        edge = tl.maximum(edge, least)  # of negative floats the bits are negative too
        drawn = tl.load(uniform + row).to(tl.float64)
        chosen = _inverse_cdf(logits, VOCABULARY, peak, rate, edge, drawn, BLOCKS, BLOCK, STAGES)
    tl.store(out + row, chosen.to(tl.int64))


def sample(
    logits_BV: Tensor,
    temperature_B: Tensor,
    top_k_B: Tensor,
    top_p_B: Tensor,
    min_p_B: Tensor,
    uniform_B: Tensor,
) -> Tensor:
    """As `torch_ops.sample`. Rows of logits may lie apart."""
    rows, vocabulary = logits_BV.shape
    logits_BV = dense_rows(logits_BV)
    ids_B = torch.empty(rows, dtype=torch.int64, device=logits_BV.device)
    block = min(BLOCK, power_of_two(vocabulary))
    launch(
        sample_kernel,
        (rows,),
        logits_BV,
        *map(dense_rows, (temperature_B, top_k_B, top_p_B, min_p_B, uniform_B)),
        ids_B,
        logits_BV.stride(0),
        VOCABULARY=vocabulary,
        LEAST_HEAT=LEAST_HEAT,
        LOG2_E=LOG2_E,
        BLOCKS=power_of_two(blocks(vocabulary, block)),
        BLOCK=block,
        STAGES=STAGES,
        num_warps=min(16, max(1, block // 256)),
    )
    return ids_B
