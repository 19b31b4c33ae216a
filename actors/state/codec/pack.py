"""Packing of items and unpacking of their layers (kv-state 3.5)."""

import logging
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from expertmesh.actors.state.codec import planes, quantized
from expertmesh.actors.state.codec.packed import (
    DTYPES,
    BadPayload,
    Blob,
    Buffer,
    Packed,
    Part,
    Scheme,
    part_of,
)
from expertmesh.actors.state.item import Item, Kind
from expertmesh.actors.state.settings import Codec

log = logging.getLogger(__name__)

_SCHEMES: dict[Codec, Scheme] = {
    "raw": Scheme.RAW,
    "lossless": Scheme.LOSSLESS,
    "int8": Scheme.INT8,
    "int4": Scheme.INT4,
}
_WORDS = {1: (torch.uint8, np.uint8), 2: (torch.int16, np.uint16), 4: (torch.int32, np.uint32)}


class Layer(NamedTuple):
    blob: Blob
    refinement: bytes


def pack(item: Item, codec: Codec) -> Packed:
    """The item's bytes, of which every layer can be had alone. Waits for `item.ready`.

    int8, int4: latents get a base in so many bits and a refinement to the exact bytes; everything
    else is packed losslessly. What does not give back its bytes, which is tried here, is kept raw.
    Raises ValueError for other dtypes than bytes and floats of 2 or 4 bytes.
    """
    if item.ready is not None:
        item.ready.synchronize()
    parts: list[Part] = []
    layers: list[Layer] = []
    for tensor in item.parts:
        part = _part(item.header.kind, tensor, _SCHEMES[codec])
        packed = [_pack_layer(part, layer) for layer in _layers(tensor)]
        if not all(map(_proof(part), _layers(tensor), packed)):
            log.error("%s does not give back %s; kept raw", part.scheme.name, part)
            part = part_of(part.shape, part.dtype, Scheme.RAW)
            packed = [_pack_layer(part, layer) for layer in _layers(tensor)]
        parts.append(part)
        layers += packed
    refined = any(part.lossy for part in parts)
    blobs = [layer.blob for layer in layers]
    return Packed.of(parts, blobs, [layer.refinement for layer in layers] if refined else ())


def unpack_layer(packed: Packed, part: int, layer: int, out: Tensor) -> None:
    """Writes one layer into `out`, of the layer's shape and dtype, on any device, also strided.

    Exact when `packed.exact`, else the estimate. Any thread. Raises ValueError for another shape
    or dtype, BadPayload for a blob that was not made by `pack`.
    """
    what = packed.parts[part]
    if out.shape != what.layer_shape or out.dtype != what.dtype:
        raise ValueError(f"{what.layer_shape} {what.dtype} into {tuple(out.shape)} {out.dtype}")
    blob, refinement = packed.blob(part, layer), packed.refinement(part, layer)
    if what.lossy and refinement is None:
        out.copy_(quantized.decode(open_rows(what, blob), out.device))
    elif out.is_cpu and out.is_contiguous():
        _unpack(what, blob, refinement, out)
    else:
        host = torch.empty(out.shape, dtype=out.dtype)
        _unpack(what, blob, refinement, host)
        out.copy_(host)


def unpack(packed: Packed) -> tuple[Tensor, ...]:
    """All parts, as new host tensors."""
    parts = tuple(torch.empty(part.shape, dtype=part.dtype) for part in packed.parts)
    for at, tensor in enumerate(parts):
        for index, layer in enumerate(_layers(tensor)):
            unpack_layer(packed, at, index, layer)
    return parts


def open_rows(part: Part, blob: Buffer) -> quantized.Base:
    """Codes, scales and error norms of a lossy layer. Raises BadPayload."""
    rows, width = part.layer_shape
    try:
        return quantized.open_base(blob, rows, width, _bits(part.scheme))
    except ValueError as error:
        raise BadPayload(str(error)) from error


def _part(kind: Kind, tensor: Tensor, scheme: Scheme) -> Part:
    if tensor.dtype not in DTYPES:
        raise ValueError(f"cannot pack {tensor.dtype}")
    if scheme.lossy and not (kind is Kind.PAGE and tensor.dim() == 3):
        scheme = Scheme.LOSSLESS
    return part_of(tuple(tensor.shape), tensor.dtype, scheme)


def _layers(tensor: Tensor) -> list[Tensor]:
    return list(tensor) if tensor.dim() > 1 else [tensor]


def _pack_layer(part: Part, layer: Tensor) -> Layer:
    if part.scheme is Scheme.RAW:
        return Layer(_words(layer.contiguous()).view(np.uint8).data, b"")
    if part.scheme is Scheme.LOSSLESS:
        return Layer(planes.encode(_words(layer.contiguous())), b"")
    return Layer(*quantized.encode(layer.contiguous(), _bits(part.scheme)))


def _unpack(part: Part, blob: Buffer, refinement: Buffer | None, out: Tensor) -> None:
    """Exact; out is contiguous on the host."""
    if part.scheme is Scheme.RAW:
        if len(blob) != part.layer_bytes:
            raise BadPayload(f"a raw blob of {len(blob)} bytes instead of {part.layer_bytes}")
        _words(out).view(np.uint8)[:] = np.frombuffer(blob, np.uint8)
    elif part.scheme is Scheme.LOSSLESS:
        planes.decode(blob, _words(out))
    else:
        assert refinement is not None
        base = quantized.decode(open_rows(part, blob), out.device)
        quantized.refine(base, refinement, out)


def _proof(part: Part) -> Callable[[Tensor, Layer], bool]:
    """Whether a layer can be had back, bit for bit."""
    if part.scheme is Scheme.RAW:
        return lambda layer, packed: True
    again = torch.empty(part.layer_shape, dtype=part.dtype)

    def holds(layer: Tensor, packed: Layer) -> bool:
        _unpack(part, memoryview(packed.blob), memoryview(packed.refinement), again)
        return bool(np.array_equal(_words(layer.contiguous()), _words(again)))

    return holds


def _words(x: Tensor) -> planes.Words:
    """The bits of a contiguous tensor, flat, sharing its memory."""
    size = x.dtype.itemsize
    as_torch, as_numpy = _WORDS[size]
    return x.view(as_torch).numpy().reshape(-1).view(as_numpy)


def _bits(scheme: Scheme) -> int:
    return 8 if scheme is Scheme.INT8 else 4
