"""Norms, residuals, gates and number formats in float64, from the equations (k3-model.md 2)."""

from typing import Any

import torch
from torch import Tensor

from tests.bench.gpu.claims import Claim, floating, none_above

Args = tuple[Any, ...]

FLOAT32 = 2e-6  # relative L2 error of a reduction in float32 over some thousand terms


def rms_norm(args: Args, result: Tensor, _: Args) -> list[Claim]:
    x, weight, eps = args
    return [floating("out", result, _normed(x, eps) * weight.double(), l2=FLOAT32, roundings=3)]


def gated_rms_norm(args: Args, result: Tensor, _: Args) -> list[Claim]:
    x, weight, gate, eps = args
    exact = _normed(x, eps) * weight.double() * torch.sigmoid(gate.double())
    return [floating("out", result, exact, l2=FLOAT32)]


def attn_res_mix(args: Args, result: Tensor, _: Args) -> list[Claim]:
    sources, score_weight, *eps = args
    exact = _mixed(sources, score_weight, *eps[:1])
    return [floating("out", result, exact, l2=5 * FLOAT32)]


def attn_res_mix_norm(args: Args, result: Tensor, _: Args) -> list[Claim]:
    sources, score_weight, norm_weight, *eps = args
    mixed = _mixed(sources, score_weight, *eps[:1])
    exact = _normed(mixed, *(eps[1:2] or [1e-5])) * norm_weight.double()
    return [floating("out", result, exact, l2=5 * FLOAT32)]


def output_gate(args: Args, result: Tensor, _: Args) -> list[Claim]:
    out, gate = args
    exact = out.double() * torch.sigmoid(gate.double())
    # The sigmoid may be rounded to the values' dtype before the product.
    return [floating("out", result, exact, l2=FLOAT32, roundings=2)]


def glu(args: Args, result: Tensor, _: Args) -> list[Claim]:
    gate_up, spec = args
    return [floating("out", result, activated(gate_up.double(), spec), l2=FLOAT32)]


def activated(gate_up: Tensor, spec: Any) -> Tensor:
    """SiTU or SiLU of [..., 2I], float64."""
    gate, up = gate_up.chunk(2, dim=-1)
    if spec.kind == "silu":
        return gate * torch.sigmoid(gate) * up
    left = spec.beta * torch.tanh(gate / spec.beta) * torch.sigmoid(gate)
    soft = spec.linear_beta
    return left * (up if soft is None else soft * torch.tanh(up / soft))


def mxfp4_decode(args: Args, result: Tensor, _: Args) -> list[Claim]:
    packed, scale, *_ = args
    exact = mxfp4_values(packed, scale).to(result.dtype).double()
    return [Claim("values", result, exact)]


def mxfp4_values(packed: Tensor, scale: Tensor) -> Tensor:
    """E2M1 pairs, low nibble first, times 2^(scale - 127); 255 is NaN. float64 [..., K]."""
    codes = torch.stack((packed & 15, packed >> 4), dim=-1).flatten(-2)
    exponent, mantissa = (codes >> 1) & 3, (codes & 1).double()
    normal = (1.0 + mantissa / 2) * torch.exp2(exponent.double() - 1)
    magnitude = torch.where(exponent == 0, mantissa / 2, normal)
    unit = torch.exp2(scale.double() - 127.0).masked_fill(scale == 255, torch.nan)
    return torch.where(codes >= 8, -magnitude, magnitude) * unit.repeat_interleave(32, dim=-1)


def fp8_encode(args: Args, result: tuple[Tensor, Tensor], _: Args) -> list[Claim]:
    """The scale is peak / 448; a code is the nearest value or, within float32's error of the
    quotient, the other neighbour: half a step of E4M3's 3 fraction bits, or of its smallest."""
    (x,), (codes, scale) = args, result
    x = x.double()
    exact_scale = x.abs().amax(1, keepdim=True) / 448.0
    exact_scale = torch.where(exact_scale == 0, 1.0, exact_scale)
    quotient = x / exact_scale
    step = torch.exp2(torch.log2(quotient.abs().clamp(min=2.0**-6)).floor() - 3)
    off = (codes.view(torch.float8_e4m3fn).double() - quotient).abs() / step
    return [
        floating("scale", scale, exact_scale, l2=3e-7, roundings=2),
        none_above("steps off", off, 0.5 + 1e-3),
    ]


def fp8_decode(args: Args, result: Tensor, _: Args) -> list[Claim]:
    codes, scale, _ = args
    exact = codes.view(torch.float8_e4m3fn).double() * scale.double()
    return [floating("out", result, exact, l2=1e-7)]


def _normed(x: Tensor, eps: float) -> Tensor:
    x = x.double()
    return x / torch.sqrt(x.square().mean(-1, keepdim=True) + eps)


def _mixed(sources: Tensor, score_weight: Tensor, eps: float = 1e-5) -> Tensor:
    score = (_normed(sources, eps) * score_weight.double()).sum(-1)
    return (torch.softmax(score, 0).unsqueeze(-1) * sources.double()).sum(0)
