"""Which items named states need: the same pages may be those of several."""

from collections import Counter
from collections.abc import Sequence

from expertmesh.actors.state.item import Name
from expertmesh.actors.state.store import Store


class Pins:
    """Counts them, and tells the store about the first and the last. Without a disk the store
    decides alone what stays."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._count: Counter[Name] = Counter()

    def add(self, names: Sequence[Name]) -> None:
        first = [name for name in names if not self._count[name]]
        self._count.update(names)
        if self._store.durable:
            self._store.pin(first)

    def remove(self, names: Sequence[Name]) -> None:
        self._count.subtract(names)
        last = [name for name in names if self._count[name] <= 0]
        for name in last:
            del self._count[name]
        if self._store.durable:
            self._store.unpin(last)

    def any(self, names: Sequence[Name]) -> bool:
        """Whether anybody needs one of them."""
        return any(self._count[name] for name in names)
