import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from expertmesh.kernels.quant import reference, torch_ops

ALL_BYTES = torch.arange(256, dtype=torch.uint8).view(16, 16).repeat(1, 4)  # 128 values a row


def exact(packed: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """2^(b - 127) * code in float64, cast once to float32."""
    table = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=torch.float64)
    codes = torch.stack((packed & 15, packed >> 4), -1).flatten(-2).long()
    values = table[codes & 7] * torch.where(codes >= 8, -1.0, 1.0)
    unit = torch.pow(2.0, scale.double() - 127).repeat_interleave(32, -1)
    return (values * unit).float()


@pytest.mark.parametrize("byte", [0, 1, 2, 100, 126, 127, 128, 200, 252, 253, 254])
@pytest.mark.parametrize("decode", [torch_ops.mxfp4_decode, reference.mxfp4_decode])
def test_decode_is_exact_for_every_code(byte: int, decode) -> None:  # type: ignore[no-untyped-def]
    scale = torch.full((16, 4), byte, dtype=torch.uint8)
    got = decode(ALL_BYTES, scale, torch.float32)
    expected = exact(ALL_BYTES, scale)
    assert torch.equal(got.view(torch.int32), expected.view(torch.int32))  # bits: -0 stays -0
    if byte == 0:
        assert got.abs()[got != 0].min() == 2.0**-128, "a subnormal was flushed"
    if byte == 254:
        assert got.isinf().any() and not got.isnan().any()


@given(rows=st.integers(0, 4), blocks=st.integers(1, 5), seed=st.integers(0, 99))
def test_decode_random(rows: int, blocks: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    packed = torch.randint(0, 256, (rows, blocks * 16), dtype=torch.uint8, generator=generator)
    scale = torch.randint(0, 255, (rows, blocks), dtype=torch.uint8, generator=generator)
    got = torch_ops.mxfp4_decode(packed, scale, torch.float32)
    assert torch.equal(got, exact(packed, scale))
    if rows:
        assert torch.equal(got, reference.mxfp4_decode(packed, scale, torch.float32))
        low = torch_ops.mxfp4_decode(packed, scale, torch.bfloat16)
        assert torch.equal(low, exact(packed, scale).bfloat16())


def test_decode_of_stacked_and_strided_experts() -> None:
    packed, scale = ALL_BYTES.view(2, 8, 64), torch.full((2, 8, 4), 120, dtype=torch.uint8)
    whole = torch_ops.mxfp4_decode(packed, scale, torch.float32)
    assert torch.equal(whole[1], torch_ops.mxfp4_decode(packed[1], scale[1], torch.float32))
    assert torch.equal(whole[:, ::2], torch_ops.mxfp4_decode(packed[:, ::2], scale[:, ::2]))


def test_scale_255_is_found_and_never_becomes_a_number() -> None:
    scale = torch.full((16, 4), 127, dtype=torch.uint8)
    assert torch_ops.invalid_scales(scale).shape == (0, 2)
    scale[3, 2] = 255
    assert torch_ops.invalid_scales(scale).tolist() == [[3, 2]]
    assert torch_ops.mxfp4_decode(ALL_BYTES, scale)[3, 64:96].isnan().all()


@given(
    rows=st.integers(1, 3),
    blocks=st.integers(1, 3),
    power=st.integers(-140, 120),
    seed=st.integers(0, 99),
)
def test_encode_matches_reference_and_is_close(
    rows: int, blocks: int, power: int, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(rows, blocks * 32, generator=generator, dtype=torch.float64) * 2.0**power
    weight[0, :32] *= torch.rand((), generator=generator).item() ** 8
    packed, scale = torch_ops.mxfp4_encode(weight)
    expected = reference.mxfp4_encode(weight)
    assert torch.equal(packed, expected[0]) and torch.equal(scale, expected[1])
    if power > -110:
        value = torch_ops.mxfp4_decode(packed, scale).double()
        peak = weight.view(rows, blocks, 32).abs().amax(-1, keepdim=True)
        # The widest gap between codes is 2 of a largest value of 6; the exponent may be one off,
        # and below 2^-127 there is none: half of the smallest step, 0.5 * 2^-127, is left.
        allowed = (peak / 4).clamp(min=2.0**-129)
        assert bool(((value - weight).view(rows, blocks, 32).abs() <= allowed).all())


def test_values_of_the_format_survive_encoding() -> None:
    generator = torch.Generator().manual_seed(1)
    packed = torch.randint(0, 256, (50, 64), dtype=torch.uint8, generator=generator)
    scale = torch.randint(1, 252, (50, 4), dtype=torch.uint8, generator=generator)
    value = torch_ops.mxfp4_decode(packed, scale)
    again = torch_ops.mxfp4_decode(*torch_ops.mxfp4_encode(value))
    assert torch.equal(again, value)


def test_ties_round_to_the_even_code() -> None:
    # With a block maximum of 6 the unit is 1; halfway points between neighbouring codes.
    middles = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])
    block = torch.zeros(1, 32)
    block[0, :7], block[0, 7:14], block[0, 31] = middles, -middles, 6.0
    got = torch_ops.mxfp4_decode(*torch_ops.mxfp4_encode(block))[0]
    even = torch.tensor([0.0, 1.0, 1.0, 2.0, 2.0, 4.0, 4.0])
    assert torch.equal(got[:7], even) and torch.equal(got[7:14], -even)


@pytest.mark.parametrize("encode", [torch_ops.mxfp4_encode, reference.mxfp4_encode])
def test_encode_refuses_bad_input(encode) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(ValueError, match="multiple of 32"):
        encode(torch.zeros(2, 40))
    with pytest.raises(ValueError, match="non-finite"):
        encode(torch.full((1, 32), float("inf")))


@pytest.mark.parametrize("power", [-149, -140, -130, -126, -10, 0, 120])
def test_fp8_matches_reference_and_is_close(power: int) -> None:
    x = torch.randn(6, 50, generator=torch.Generator().manual_seed(-power)).double() * 2.0**power
    x = x.float()
    x[4] = 0.0
    codes, scale = torch_ops.fp8_encode(x)
    expected = reference.fp8_encode(x)
    assert torch.equal(codes, expected[0]) and torch.equal(scale, expected[1])
    assert scale[4] == 1.0
    got = torch_ops.fp8_decode(codes, scale, torch.float32)
    assert torch.equal(got, reference.fp8_decode(codes, scale, torch.float32))
    # A finite row stays finite; what is left of the smallest is what the smallest scale resolves.
    peak = x.abs().amax(1, keepdim=True)
    assert bool(((got - x).abs() <= x.abs() / 16 + peak / 448 / 512 + 2.0**-135).all())
