"""Codecs of latents as functions, those that ship and those that they are compared with."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from expertmesh.actors.state.codec.pack import pack, unpack
from expertmesh.actors.state.codec.rotation import rotate, unrotate
from expertmesh.actors.state.item import Header, Item, Kind
from expertmesh.actors.state.settings import Codec

SHIPPED: tuple[Codec, ...] = ("raw", "lossless", "int8", "int4")
_FP8_MAX = 448.0


class Read(NamedTuple):
    """latents: what comes back. bits: per value, of what it was read from; exact_bits: of the exact
    bytes, None where there is no way back to them."""

    latents: Tensor
    bits: float
    exact_bits: float | None


@dataclass(frozen=True, slots=True)
class Estimate:
    """of: latents [layers, n, W] -> the same, as a codec gives them back."""

    name: str
    of: Callable[[Tensor], Read]


def shipped(codec: Codec) -> Estimate:
    """What a store with this codec gives back when it may be an estimate: the base alone."""

    def read(latents: Tensor) -> Read:
        packed = pack(page(latents), codec)
        base = packed.base()
        values = latents.numel()
        return Read(unpack(base)[0], 8 * base.nbytes / values, 8 * packed.nbytes / values)

    return Estimate(codec, read)


def compared() -> list[Estimate]:
    """Fewer bits than are shipped, fp8 with a scale per row, one row per page, and int8 and int4
    without rotation."""
    return [
        Estimate("int3_rotated", lambda latents: _rotated(latents, 3)),
        Estimate("int2_rotated", lambda latents: _rotated(latents, 2)),
        Estimate("fp8_e4m3_rows", _fp8),
        Estimate("centroid", _centroid),
        Estimate("int8_unrotated", lambda latents: _plain(latents, 8)),
        Estimate("int4_unrotated", lambda latents: _plain(latents, 4)),
    ]


def page(latents: Tensor) -> Item:
    """An item around latents [layers, n, W]; its name means nothing."""
    header = Header(b"", Kind.PAGE, b"", latents.shape[1], (), "prefill", b"")
    return Item(header, (latents.contiguous(),))


def _fp8(latents: Tensor) -> Read:
    rows = latents.float()
    scale = (rows.abs().amax(-1, keepdim=True) / _FP8_MAX).clamp_min(1e-30)
    estimate = (rows / scale).to(torch.float8_e4m3fn).float() * scale
    return Read(estimate.to(latents.dtype), 8 + 16 / latents.shape[-1], None)


def _centroid(latents: Tensor) -> Read:
    mean = latents.float().mean(dim=1, keepdim=True)
    return Read(mean.expand_as(latents).to(latents.dtype), 16 / latents.shape[1], None)


def _rotated(latents: Tensor, bits: int) -> Read:
    rotated = torch.from_numpy(rotate(latents.float().numpy()))
    estimate, used, _ = _plain(rotated, bits)
    back = torch.from_numpy(unrotate(estimate.numpy())).to(latents.dtype)
    return Read(back, used, None)


def _plain(latents: Tensor, bits: int) -> Read:
    """The same steps and levels as the shipped codec's, over the row as it is."""
    rows, half = latents.float(), 1 << (bits - 1)
    step = (rows.abs().amax(-1, keepdim=True) / half).clamp_min(1e-30)
    codes = (rows / step).floor().clamp(-half, half - 1)
    estimate = ((codes + 0.5) * step).to(latents.dtype)
    return Read(estimate, bits + 16 / latents.shape[-1], None)
