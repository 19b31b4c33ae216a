"""Whose load is next: one of each fetch in turn, so that none waits for all of another's."""

from collections import deque
from collections.abc import Sequence

from expertmesh.actors.state.tiers.fetch import Loading, StoreFetch


class Turns:
    """Loads of one tier, by fetch. A load that several fetches want is in the line of each, and is
    started by the first whose turn comes.

    Not synchronised: the store's lock is held around every call.
    """

    def __init__(self) -> None:
        self._lines: deque[tuple[StoreFetch, deque[Loading]]] = deque()

    def add(self, fetch: StoreFetch, loads: Sequence[Loading]) -> None:
        if loads:
            self._lines.append((fetch, deque(loads)))

    def take(self) -> Loading | None:
        """The next load that nobody has started and somebody wants, now started; None: none."""
        while self._lines:
            fetch, line = self._lines.popleft()
            while line and (line[0].started or not line[0].waiters):
                line.popleft()
            if not line:
                continue
            load = line.popleft()
            load.started = True
            if line:
                self._lines.append((fetch, line))
            return load
        return None

    def __len__(self) -> int:
        return sum(len(line) for _, line in self._lines)
