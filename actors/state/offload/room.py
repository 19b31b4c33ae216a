"""Host memory and disk for what running sequences have off the device: who may fill how much.

Only counts. All fill host memory first. Where it ends, whoever has most there has the oldest of it
go to disk, piece by piece, until all have what they need (kv-state 3.0: hot, warm, cold).
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from expertmesh.actors.state.item import Kind, StateLayout
from expertmesh.actors.state.offload.base_rows import BaseRows
from expertmesh.actors.state.offload.context import BASE_BITS, OffloadedContext, far_pages
from expertmesh.actors.state.offload.spill import Shape, piece_bytes
from expertmesh.actors.state.settings import StateSettings


class Far(NamedTuple):
    """What a sequence has off the device. pages: of rows. nbytes: of them, and of what estimates
    are made from, which stays in host memory. pieces: most of them that may be on disk; some newest
    pages always wait for a piece to be whole."""

    pages: int = 0
    nbytes: int = 0
    pieces: int = 0


@dataclass(slots=True)
class _Held:
    far: Far
    pieces: int = 0  # on disk

    @property
    def left(self) -> int:
        """Pieces that could go there, too."""
        return self.far.pieces - self.pieces


@dataclass(slots=True)
class _Sizes:
    """rows: bytes of a page's rows; page: of a page by mode. piece, on_disk: bytes of a piece's
    rows in host memory, and on disk."""

    rows: int = 0
    piece_pages: int = 1
    on_disk: int = 1
    page: dict[str, int] = field(default_factory=dict)

    @property
    def piece(self) -> int:
        return self.rows * self.piece_pages


class OffloadRoom:
    """By the number of a sequence. Belongs to the engine's thread."""

    def __init__(
        self, settings: StateSettings, layout: StateLayout | None, disk: bool = True
    ) -> None:
        """layout: of the model's state; None where nothing leaves the device. disk: whether there
        is the one that the settings name."""
        self._settings, self._held = settings, dict[int, _Held]()
        self._sizes = _Sizes() if layout is None else _sizes(settings, layout)
        self.capacity = self.free = settings.offload_bytes if layout is not None else 0
        disk_bytes = settings.offload_disk_bytes if disk and layout is not None else 0
        self._pieces = self._free_pieces = disk_bytes // self._sizes.on_disk

    @property
    def disk_capacity(self) -> int:
        """Bytes, of whole pieces."""
        return self._pieces * self._sizes.on_disk

    @property
    def disk_bytes(self) -> int:
        """That may be filled by now. From any thread."""
        return (self._pieces - self._free_pieces) * self._sizes.on_disk

    def far(self, mode: str, tokens: int, disk: bool = True) -> Far:
        """Most that a sequence of this mode has off the device until so many tokens are computed.
        disk: whether some of it may be there."""
        pages, sizes = far_pages(self._settings, tokens), self._sizes
        each = sizes.page.get(mode, 0)
        if not each:
            return Far()
        pieces = max(0, pages // sizes.piece_pages - 1) if disk and self._pieces else 0
        return Far(pages, pages * each, pieces)

    def far_of(self, context: OffloadedContext, tokens: int) -> Far:
        return self.far(context.mode, tokens, context.disk)

    def ever(self, far: Far) -> bool:
        """Whether there is room for it when it is alone."""
        return far.nbytes - min(far.pieces, self._pieces) * self._sizes.piece <= self.capacity

    def shortage(self, far: Far) -> str:
        """What that needs and what there is, for whom it is refused to."""
        disk = f", and {self.disk_capacity} on disk" if self._pieces else ""
        return f"need {far.nbytes} bytes of host memory, which has {self.capacity} for that{disk}"

    def fits(self, number: int, far: Far, without: Iterable[int] = ()) -> bool:
        """Whether the sequence could have that, if those of other numbers had nothing."""
        if far.nbytes <= self.free:
            return True  # in most steps; what follows looks at everybody
        gone = {number, *without}
        held = [self._held[each] for each in gone if each in self._held]
        free = self.free + sum(map(self._bytes, held))
        disk = self._free_pieces + sum(each.pieces for each in held)
        going = far.pieces + sum(one.left for each, one in self._held.items() if each not in gone)
        return far.nbytes - min(disk, going) * self._sizes.piece <= free

    def hold(self, number: int, far: Far) -> bool:
        """The sequence may have that from now on. False, and all stays as it was, where there is no
        room."""
        mine = self._held.get(number) or _Held(Far())
        more = far.nbytes - mine.far.nbytes
        if more > self.free and not self.fits(number, far):
            return False
        self._held[number] = mine
        mine.far = far
        self.free -= more
        while self.free < 0:
            self._push()
        return True

    def _push(self) -> None:
        """A piece of who has most in host memory goes to disk."""
        most = max((one for one in self._held.values() if one.left > 0), key=self._bytes)
        most.pieces += 1
        self.free += self._sizes.piece
        self._free_pieces -= 1

    def held(self, number: int) -> int:
        """Bytes of host memory."""
        return self._bytes(self._held[number]) if number in self._held else 0

    def on_disk(self, number: int) -> int:
        """Pieces of the sequence that are to be there."""
        return self._held[number].pieces if number in self._held else 0

    def let_go(self, number: int) -> None:
        """The sequence has nothing any more."""
        gone = self._held.pop(number, None)
        if gone is not None:
            self.free += self._bytes(gone)
            self._free_pieces += gone.pieces

    def _bytes(self, held: _Held) -> int:
        return held.far.nbytes - held.pieces * self._sizes.piece


def _sizes(settings: StateSettings, layout: StateLayout) -> _Sizes:
    layers, tokens, width = layout.page
    bits = BASE_BITS.get(settings.codec)
    base = 0 if bits is None else layers * BaseRows.page_bytes(bits, width)
    pages = settings.offload_disk_pages
    on_disk = piece_bytes(Shape(layers, tokens, width, layout.dtype), pages)
    rows = layout.nbytes(Kind.PAGE)
    return _Sizes(rows, pages, on_disk, {"offload": rows, "select": rows + base})
