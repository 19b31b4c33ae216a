"""Packing of items and unpacking of their layers (kv-state 3.5)."""

import logging
from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from expertmesh.actors.state.alike import runs
from expertmesh.actors.state.codec import planes, quantized
from expertmesh.actors.state.codec.packed import (
    DTYPES,
    BadPayload,
    Blob,
    Buffer,
    Packed,
    Part,
    Scheme,
    blobs,
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
_HEAD = attrgetter("head")
_STAGED = 1 << 22  # bytes on their way to a device
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
    refinements = [layer.refinement for layer in layers] if refined else ()
    return Packed.of(parts, [layer.blob for layer in layers], refinements)


def unpack_layer(packed: Packed, part: int, layer: int, out: Tensor) -> None:
    """Writes one layer into `out`, of the layer's shape and dtype: see `unpack_layers`."""
    what = packed.parts[part]
    if what.lossy or not _plain(out):
        unpack_layers([packed], part, layer, out[None], [0])
    else:
        _check(what, out.shape, out.dtype)
        _unpack(what, [packed.blob(part, layer)], _words(out)[None], [0])


def unpack_layers(
    items: Sequence[Packed], part: int, layer: int, out: Tensor, rows: Sequence[int]
) -> None:
    """Writes one layer of items[i] into out[rows[i]], all rows different; out [any, *shape of the
    layer], on any device, also strided. A call for many costs little for each.

    Exact where the item is, else the estimate. Any thread. Raises ValueError for another shape,
    dtype or count, BadPayload for a blob that was not made by `pack`; some rows may be written by
    then.
    """
    if len(items) != len(rows):
        raise ValueError(f"{len(items)} items into {len(rows)} rows")
    for run in runs(map(_HEAD, items)):
        alike, places = items[run], rows[run]
        head = alike[0].head
        what = head.parts[part]
        _check(what, out.shape[1:], out.dtype)
        if what.lossy and not head.refined:
            for item, row in zip(alike, places, strict=True):
                base = open_rows(what, item.blob(part, layer))
                out[row].copy_(quantized.decode(base, out.device))
        elif not _plain(out):
            _unpack_staged(alike, part, layer, out, places)
        elif what.lossy:
            for item, row in zip(alike, places, strict=True):
                _refined(what, item.blob(part, layer), item.refinement(part, layer), out[row])
        else:
            words = _words(out).reshape(out.shape[0], -1)
            _unpack(what, blobs(alike, part, layer), words, places)


def _unpack_staged(
    items: Sequence[Packed], part: int, layer: int, out: Tensor, rows: Sequence[int]
) -> None:
    """By way of host memory, in few copies."""
    many = max(1, _STAGED // max(1, out[0].nbytes))
    for begin in range(0, len(items), many):
        some = items[begin : begin + many]
        host = torch.empty((len(some), *out.shape[1:]), dtype=out.dtype)
        unpack_layers(some, part, layer, host, range(len(some)))
        places = torch.tensor(rows[begin : begin + many], device=out.device)
        out.index_copy_(0, places, host.to(out.device))


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


def _unpack(part: Part, found: Sequence[Buffer], out: planes.Words, rows: Sequence[int]) -> None:
    """Of schemes that are not lossy. out: [any, words of a layer]."""
    if part.scheme is Scheme.LOSSLESS:
        planes.decode_rows(found, out, rows)
        return
    flat, size = out.view(np.uint8), part.layer_bytes
    for blob, row in zip(found, rows, strict=True):
        if len(blob) != size:  # one byte would be written everywhere
            raise BadPayload(f"a raw blob of {len(blob)} bytes instead of {size}")
        flat[row] = np.frombuffer(blob, np.uint8)


def _refined(part: Part, blob: Buffer, refinement: Buffer | None, out: Tensor) -> None:
    """Of lossy schemes; out is contiguous on the host."""
    assert refinement is not None
    quantized.refine(quantized.decode(open_rows(part, blob), out.device), refinement, out)


def _proof(part: Part) -> Callable[[Tensor, Layer], bool]:
    """Whether a layer can be had back, bit for bit."""
    if part.scheme is Scheme.RAW:
        return lambda layer, packed: True
    again = torch.empty(part.layer_shape, dtype=part.dtype)

    def holds(layer: Tensor, packed: Layer) -> bool:
        blob = memoryview(packed.blob)
        if part.lossy:
            _refined(part, blob, memoryview(packed.refinement), again)
        else:
            _unpack(part, [blob], _words(again)[None], [0])
        return bool(np.array_equal(_words(layer.contiguous()), _words(again)))

    return holds


def _check(part: Part, shape: torch.Size, dtype: torch.dtype) -> None:
    if shape != part.layer_shape or dtype != part.dtype:
        raise ValueError(f"{part.layer_shape} {part.dtype} into {tuple(shape)} {dtype}")


def _plain(out: Tensor) -> bool:
    """Whether numpy sees it as one run of numbers."""
    return out.is_cpu and out.is_contiguous()


def _words(x: Tensor) -> planes.Words:
    """The bits of a contiguous tensor, flat, sharing its memory."""
    size = x.dtype.itemsize
    as_torch, as_numpy = _WORDS[size]
    return x.view(as_torch).numpy().reshape(-1).view(as_numpy)


def _bits(scheme: Scheme) -> int:
    return 8 if scheme is Scheme.INT8 else 4
