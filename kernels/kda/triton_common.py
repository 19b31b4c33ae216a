"""Elementwise parts that decode and prefill share on a GPU; float32 throughout."""

import triton
import triton.language as tl


@triton.jit
def stable_sigmoid(x):
    """1 / (1 + exp(-x)) from exp(-|x|) alone, which cannot overflow."""
    small = tl.exp(-tl.abs(x))
    return tl.where(x >= 0.0, 1.0, small) / (1.0 + small)


@triton.jit
def stable_softplus(x):
    """log(1 + exp(x)), to the last bits also where it is tiny.

    log(1 + e) alone would be 0 for e < 2^-24. With w = 1 + e as rounded, log(w) / (w - 1) is right
    to rounding, and e times it is log1p(e).
    """
    small = tl.exp(-tl.abs(x))
    above = 1.0 + small
    exact = above == 1.0
    ratio = tl.log(above) / tl.where(exact, 1.0, above - 1.0)
    return tl.maximum(x, 0.0) + tl.where(exact, small, small * ratio)


@triton.jit
def log_decay(x, rate, lower_bound, BOUNDED: tl.constexpr):
    """<= 0, per key channel: lower_bound * sigmoid(rate x) or -rate * softplus(x)."""
    if BOUNDED:
        return lower_bound * stable_sigmoid(rate * x)
    else:
        return -rate * stable_softplus(x)


@triton.jit
def silu_as(x, like):
    """SiLU, rounded to the activations' type as the model's own convolution does, in float32."""
    return (x * stable_sigmoid(x)).to(like.dtype.element_ty).to(tl.float32)


@triton.jit
def inverse_norm(sum_of_squares):
    return 1.0 / tl.sqrt(sum_of_squares + 1e-6)


@triton.jit
def operand(x, PRECISION: tl.constexpr):
    """A float32 operand of a dot of this input precision, rounded to nearest where it is TF32.

    Tensor cores ignore the last 13 bits: unrounded operands would all shrink, and with them the
    state. Rounded here, an interpreted kernel also multiplies the numbers that a GPU does.
    """
    if PRECISION == "tf32":
        bits = x.to(tl.int32, bitcast=True) + 0x1000
        # A GPU's own NaN has all bits set, and the sum would carry it over to zero.
        return tl.where(x == x, (bits & -0x2000).to(tl.float32, bitcast=True), x)
    else:
        return x
