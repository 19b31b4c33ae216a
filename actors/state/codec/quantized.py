"""Rotated rows in 8 or 4 bits, and what is missing to the exact bits (kv-state 3.3 e, 3.4).

Base blob of rows [n, W]: codes (int8 [n, W], or two per byte [n, ceil(W / 2)], low half first),
scales bf16 [n, blocks], error norms bf16 [n]. A value of the rotated row is (code + 1/2) * step:
no code is lost on a zero that Gaussian values do not have, and nothing is clipped. Scale is the
step over twice the root of the block's size, so that the estimate of the row itself is

    signs * scale * hadamard(2 * code + 1)

whose sums are exact and whose one rounding is the same everywhere. The error norm bounds the
distance of a row from its estimate from above.

Refinement blob: the row's bits minus the estimate's, both counted in the order of their floats,
zigzag, as byte planes.
"""

from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from expertmesh.actors.state.codec import planes
from expertmesh.actors.state.codec.packed import Buffer
from expertmesh.actors.state.codec.rotation import (
    LEAST,
    Floats,
    blocks,
    hadamard,
    hadamard_on,
    signs,
)

# Rows beyond are zeros to the base: their sums or steps would leave the range of floats.
_TINY, _HUGE = np.float32(2.0**-100), np.float32(2.0**100)
_SLACK = np.float32(1 + 2.0**-12)  # more than rounding takes from a sum or a quotient


class Base(NamedTuple):
    """Views of a base blob. codes int8 [n, W]; scales bf16 [n, blocks]; errors bf16 [n].

    The rotated estimate is (code + 1/2) * 2 * sqrt(block) * scale: with a query rotated once,
    scores need no rotation of rows.
    """

    codes: Tensor
    scales: Tensor
    errors: Tensor


def encode(rows: Tensor, bits: int) -> tuple[bytes, bytes]:
    """rows [n, W] of bf16, fp16 or fp32 on the host -> (base, refinement)."""
    base, estimate = encode_base(rows, bits)
    return base, _refinement(rows, torch.from_numpy(estimate).to(rows.dtype))


def encode_base(rows: Tensor, bits: int) -> tuple[bytes, Floats]:
    """The base alone, and the estimate fp32 [n, W] that it gives."""
    values = rows.float().numpy()
    peaks = np.maximum(values.max(axis=1), -values.min(axis=1))
    usable = peaks < _HUGE  # False for NaN
    if not usable.all():
        values = np.where(usable[:, None], values, np.float32(0))
    codes, scales = _codes(hadamard(values * signs(rows.shape[1])), bits)
    estimate = _estimate(codes, scales)
    wrong = values - estimate
    distance = np.sqrt(np.einsum("nw,nw->n", wrong, wrong)) * _SLACK
    distance[~usable] = np.inf
    packed = codes if bits == 8 else _pairs(codes)
    base = b"".join([packed.tobytes(), _words(scales).tobytes(), _words(_up(distance)).tobytes()])
    return base, estimate


def _codes(turned: Floats, bits: int) -> tuple[NDArray[np.int8], Tensor]:
    """turned [n, W]: rows times the matrices of +-1. -> codes [n, W], scales bf16 [n, blocks]."""
    half, at = 1 << (bits - 1), 0
    codes, scales = np.empty(turned.shape, np.int8), []
    for size in blocks(turned.shape[1]):
        block = turned[:, at : at + size]
        steps = 2 * (size if size >= LEAST else 1)  # of `turned`, in scales
        peaks = np.maximum(block.max(axis=1), -block.min(axis=1))
        # A step that the peak fills exactly may, rounded, leave it outside.
        scale = _up(peaks * (_SLACK / (half * steps)))
        scale[peaks < _TINY] = 0
        inverse = scale.float().numpy() * steps
        np.divide(1, inverse, out=inverse, where=inverse > 0)
        levels = np.floor(block * inverse[:, None])
        np.clip(levels, -half, half - 1, out=codes[:, at : at + size], casting="unsafe")
        scales.append(scale)
        at += size
    return codes, torch.stack(scales, dim=1)


def open_base(blob: Buffer, rows: int, width: int, bits: int) -> Base:
    """Raises ValueError where the blob is not that of [rows, width]."""
    count = len(blocks(width))
    inner = width if bits == 8 else -(-width // 2)
    if len(blob) != rows * (inner + 2 * count + 2):
        raise ValueError(f"a base of {len(blob)} bytes for [{rows}, {width}] in {bits} bits")
    flat = np.frombuffer(blob, np.uint8).copy()  # tensors must be writable
    codes = flat[: rows * inner].reshape(rows, inner)
    signed = codes.view(np.int8) if bits == 8 else _unpair(codes, width)
    rest = torch.from_numpy(flat[rows * inner :]).view(torch.bfloat16)
    scales = rest[: rows * count].view(rows, count)
    return Base(torch.from_numpy(signed), scales, rest[rows * count :])


def decode(base: Base, device: torch.device) -> Tensor:
    """The estimate of the rows, fp32 [n, W] on `device`; the same bits on every one."""
    if device.type == "cpu":
        return torch.from_numpy(_estimate(base.codes.numpy(), base.scales))
    return decode_on(base, device)


def decode_on(base: Base, device: torch.device) -> Tensor:
    """`decode` in torch, for any device."""
    codes, scales = base.codes.to(device), base.scales.to(device).float()
    width = codes.shape[1]
    sizes = torch.tensor(blocks(width), device=device)
    wide = torch.repeat_interleave(scales, sizes, dim=1, output_size=width)
    return hadamard_on(codes.float() * 2 + 1) * wide * torch.from_numpy(signs(width)).to(device)


def refine(estimate: Tensor, refinement: Buffer, out: Tensor) -> None:
    """estimate fp32 [n, W] as `decode` gives it, out [n, W] contiguous on the host: the exact
    rows. Raises BadPayload."""
    kind = _UNSIGNED[out.dtype.itemsize]
    zigzag: planes.Words = np.empty(out.numel(), kind)
    planes.decode(refinement, zigzag, signed=False)
    delta = (zigzag >> 1) ^ (~(zigzag & 1) + 1)
    ordered = _ordered(_words(estimate.to(out.dtype))) + delta
    _words(out)[:] = _ordered(ordered)


def _estimate(codes: NDArray[np.int8], scales: Tensor) -> Floats:
    """hadamard(2 c + 1) is 2 hadamard(c), and the block's size in its first column."""
    width = codes.shape[1]
    rows, steps, at = hadamard(codes.astype(np.float32)), scales.float().numpy() * 2, 0
    for index, size in enumerate(blocks(width)):
        block = rows[:, at : at + size]
        if size < LEAST:
            block += 0.5
        else:
            block[:, 0] += size / 2
        block *= steps[:, index : index + 1]
        at += size
    rows *= signs(width)
    return rows


def _refinement(rows: Tensor, estimate: Tensor) -> bytes:
    delta = _ordered(_words(rows)) - _ordered(_words(estimate))
    top = 8 * delta.itemsize - 1
    return planes.encode((delta << 1) ^ (~(delta >> top) + 1), signed=False)


_UNSIGNED: dict[int, type[np.uint16] | type[np.uint32]] = {2: np.uint16, 4: np.uint32}


def _words(x: Tensor) -> planes.Words:
    """The bits of contiguous floats, flat, sharing their memory."""
    size = x.dtype.itemsize
    words = x.view(torch.int16 if size == 2 else torch.int32).view(-1).numpy()
    unsigned: planes.Words = words.view(_UNSIGNED[size])
    return unsigned


def _ordered(bits: planes.Words) -> planes.Words:
    """Whole numbers in the order of the floats; its own inverse."""
    top = 8 * bits.itemsize - 1
    ordered: planes.Words = bits ^ ((~(bits >> top) + 1) >> 1)
    return ordered


def _up(x: Floats) -> Tensor:
    """bf16 not below x >= 0."""
    near = torch.from_numpy(x).to(torch.bfloat16)
    low = near.float() < torch.from_numpy(x)
    return (near.view(torch.int16) + low.to(torch.int16)).view(torch.bfloat16)


def _pairs(codes: NDArray[np.int8]) -> planes.Words:
    even = codes if codes.shape[1] % 2 == 0 else np.pad(codes, ((0, 0), (0, 1)))
    low, high = even[:, 0::2].view(np.uint8), even[:, 1::2].view(np.uint8)
    return (low & 15) | (high << 4)


def _unpair(packed: NDArray[np.uint8], width: int) -> NDArray[np.int8]:
    codes = np.empty((packed.shape[0], packed.shape[1] * 2), np.int8)
    codes[:, 0::2] = (packed << 4).view(np.int8) >> 4
    codes[:, 1::2] = packed.view(np.int8) >> 4
    return codes[:, :width]
