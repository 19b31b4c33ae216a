"""A signed Hadamard rotation of rows, whose inverse is exact where rows are integers (3.3 e).

Rotated, the values of a row are close to Gaussian whatever channel sticks out, so one step per
block serves all. Widths that are no power of two are cut into such blocks: 576 is 512 + 64.

Sums of whole numbers below 2^24 are exact in float32 in any order, so codes are rotated back to
the same bits by every library and device. Only that makes a refinement of the outcome possible.
"""

from functools import cache

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Floats = NDArray[np.float32]

# Larger blocks gain little, and 255 * MOST stays far below 2^24.
MOST = 512
LEAST = 8
_SEED = 0x6D657368  # part of the format


@cache
def blocks(width: int) -> tuple[int, ...]:
    """Sizes of the blocks that a row of `width` values is cut into, powers of two but for a rest
    of less than 8 values, which is not rotated."""
    sizes: list[int] = []
    while width >= LEAST:
        sizes.append(min(MOST, 1 << (width.bit_length() - 1)))
        width -= sizes[-1]
    return (*sizes, width) if width else tuple(sizes)


@cache
def signs(width: int) -> Floats:
    """+1 or -1 per value, the same for all rows."""
    drawn = np.random.Generator(np.random.PCG64(_SEED)).integers(0, 2, width)
    return (2 * drawn - 1).astype(np.float32)


@cache
def norms(width: int) -> Floats:
    """Per value sqrt of the block's size: both ways multiply by it."""
    sizes = np.array([size if size >= LEAST else 1 for size in blocks(width)], np.float32)
    return np.repeat(np.sqrt(sizes), blocks(width))


def rotate(rows: Floats) -> Floats:
    """rows [..., W] -> [..., W] of the same lengths, block for block."""
    return hadamard(rows * signs(rows.shape[-1])) / norms(rows.shape[-1])


def unrotate(rows: Floats) -> Floats:
    """The inverse of `rotate`, up to rounding."""
    return hadamard(rows) * (signs(rows.shape[-1]) / norms(rows.shape[-1]))


def hadamard(rows: Floats) -> Floats:
    """rows [..., W] times the +-1 matrix of each block. Exact where rows are small integers."""
    out, at = np.empty_like(rows), 0
    for size in blocks(rows.shape[-1]):
        piece = rows[..., at : at + size]
        out[..., at : at + size] = piece if size < LEAST else _product(piece, size)
        at += size
    return out


def hadamard_on(rows: Tensor) -> Tensor:
    """`hadamard` on the tensor's device, by sums and differences only: matmuls may round there."""
    pieces = []
    for piece in torch.split(rows, list(blocks(rows.shape[-1])), dim=-1):
        size, step = piece.shape[-1], 1
        while size >= LEAST and step < size:
            pairs = piece.reshape(*rows.shape[:-1], -1, 2, step)
            left, right = pairs[..., 0, :], pairs[..., 1, :]
            piece = torch.stack((left + right, left - right), dim=-2)
            step *= 2
        pieces.append(piece.reshape(*rows.shape[:-1], size))
    return torch.cat(pieces, dim=-1)


def _product(piece: Floats, size: int) -> Floats:
    """By two small matrices, of which the large one is the Kronecker product."""
    small = 1 << ((size.bit_length() - 1) // 2)
    inner: Floats = piece.reshape(-1, small) @ _matrix(small)
    outer: Floats = _matrix(size // small) @ inner.reshape(-1, size // small, small)
    return outer.reshape(piece.shape)


@cache
def _matrix(size: int) -> Floats:
    matrix = np.ones((1, 1), np.float32)
    while matrix.shape[0] < size:
        matrix = np.block([[matrix, matrix], [matrix, -matrix]])
    return matrix
