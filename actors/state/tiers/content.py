"""The bytes of one item in host memory: as they came from the device, or packed and hashed."""

import time
from collections.abc import Sequence
from typing import Protocol

import xxhash
from torch import Tensor

from expertmesh.actors.state.alike import runs
from expertmesh.actors.state.codec.pack import pack, unpack_layer, unpack_layers
from expertmesh.actors.state.codec.packed import Buffer, Packed
from expertmesh.actors.state.item import Item
from expertmesh.actors.state.settings import Codec


class Content(Protocol):
    """What an entry of the host tier holds. Immutable: readers need no lock. packed: None before it
    is."""

    @property
    def packed(self) -> Packed | None: ...

    @property
    def nbytes(self) -> int: ...

    @property
    def raw_bytes(self) -> int: ...

    @property
    def exact(self) -> bool: ...

    def verified(self, timeout_s: float) -> bool:
        """Whether the bytes are there, and are those that were put. May wait for the device."""
        ...

    def layer(self, part: int, index: int, out: Tensor) -> None: ...


class Unpacked:
    """An item that waits for being packed: it can be read already, so that the engine need not wait
    before it gives the device's copy away."""

    def __init__(self, item: Item) -> None:
        self.item = item
        self.packed = None
        self.nbytes = self.raw_bytes = item.nbytes
        self.exact = True

    def verified(self, timeout_s: float) -> bool:
        return arrived(self.item, timeout_s)

    def layer(self, part: int, index: int, out: Tensor) -> None:
        tensor = self.item.parts[part]
        out.copy_(tensor[index] if tensor.dim() > 1 else tensor)


class Stored:
    """A packed item with its hash: memory that something else has written into is a miss, too."""

    def __init__(self, packed: Packed, body: Buffer | None = None, known: bytes = b"") -> None:
        """body, known: what `packed` lies in, and xxh3-128 of that if it was hashed already."""
        self.packed = packed
        self._body = memoryview(packed.data) if body is None else body
        self.nbytes, self.raw_bytes = len(self._body), packed.raw_bytes
        self.exact = packed.exact
        self._digest = known or xxhash.xxh3_128_digest(self._body)

    def verified(self, timeout_s: float) -> bool:
        return xxhash.xxh3_128_digest(self._body) == self._digest

    def layer(self, part: int, index: int, out: Tensor) -> None:
        unpack_layer(self.packed, part, index, out)


def write_layers(
    contents: Sequence[Content], part: int, index: int, out: Tensor, rows: Sequence[int]
) -> None:
    """As `layer` of contents[i] into out[rows[i]], but packed ones together."""
    packed = [content.packed for content in contents]
    for run in runs(one is None for one in packed):
        together = [one for one in packed[run] if one is not None]
        if together:
            unpack_layers(together, part, index, out, rows[run])
        else:
            for content, row in zip(contents[run], rows[run], strict=True):
                content.layer(part, index, out[row])


def store_packed(item: Item, codec: Codec) -> tuple[Packed, Stored]:
    """All of an item as the disk takes it, and what of it stays in host memory: of a lossy codec
    the base alone, whose refinement is kept one tier below (kv-state 3.4)."""
    packed = pack(item, codec)
    return packed, Stored(packed.base())


def arrived(item: Item, timeout_s: float) -> bool:
    """Whether the device has written the item by then."""
    deadline = time.monotonic() + timeout_s
    while item.ready is not None and not item.ready.query():  # type: ignore[no-untyped-call]
        if time.monotonic() >= deadline:
            return False
        time.sleep(0.0002)
    return True
