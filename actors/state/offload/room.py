"""Host memory for what running sequences have off the device: who may fill how much of it."""

from expertmesh.actors.state.item import Kind, StateLayout
from expertmesh.actors.state.offload.base_rows import BaseRows
from expertmesh.actors.state.offload.context import BASE_BITS, far_pages
from expertmesh.actors.state.settings import StateSettings


class HostRoom:
    """Bytes, by the number of the sequence that may fill them. Only counts, and belongs to the
    engine's thread."""

    def __init__(self, settings: StateSettings, layout: StateLayout | None) -> None:
        """layout: of the model's state; None where nothing leaves the device."""
        self.capacity = self.free = settings.offload_bytes if layout is not None else 0
        self._settings, self._held = settings, dict[int, int]()
        self._each = {} if layout is None else _bytes_of_a_page(settings, layout)

    def need(self, mode: str, tokens: int) -> int:
        """Most bytes that a context of this mode fills until so many tokens are computed."""
        return far_pages(self._settings, tokens) * self._each.get(mode, 0)

    def ever(self, mode: str, tokens: int) -> bool:
        """Whether a sequence that comes to so many tokens has room when it is alone."""
        return self.need(mode, tokens) <= self.capacity

    def held(self, number: int) -> int:
        return self._held.get(number, 0)

    def hold(self, number: int, nbytes: int) -> bool:
        """The sequence may fill so many bytes from now on. False, and all stays as it was, where
        there are not so many."""
        more = nbytes - self.held(number)
        if more > self.free:
            return False
        self.free -= more
        self._held[number] = nbytes
        return True

    def let_go(self, number: int) -> None:
        """The sequence fills nothing any more."""
        self.free += self._held.pop(number, 0)


def _bytes_of_a_page(settings: StateSettings, layout: StateLayout) -> dict[str, int]:
    """By mode: its rows, and what estimates are made from where that is in host memory too."""
    rows, (layers, _, width) = layout.nbytes(Kind.PAGE), layout.page
    bits = BASE_BITS.get(settings.codec)
    base = 0 if bits is None else layers * BaseRows.page_bytes(bits, width)
    return {"offload": rows, "select": rows + base}
