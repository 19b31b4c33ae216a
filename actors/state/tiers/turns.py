"""Whose loads are next: some of each fetch in turn, so that none waits for all of another's."""

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

    def take(self, most: int = 1, enough: int = 0) -> list[Loading]:
        """The next loads of whoever's turn it is that nobody has started and somebody wants, now
        started: at most so many, and no more than it takes to have `enough` bytes. Empty: there are
        none."""
        while self._lines:
            fetch, line = self._lines.popleft()
            taken, nbytes = list[Loading](), 0
            while line and len(taken) < most and (not taken or nbytes < enough):
                load = line.popleft()
                if load.waiters and not load.started:
                    load.started = True
                    taken.append(load)
                    nbytes += load.nbytes
            if line:
                self._lines.append((fetch, line))
            if taken:
                return taken
        return []

    def __len__(self) -> int:
        return sum(len(line) for _, line in self._lines)
