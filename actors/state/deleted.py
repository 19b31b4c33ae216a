"""Which sessions were deleted lately: no request that came before brings them back.

A turn that was under way goes on, perhaps in another replica, which may never have known the
session. So every replica notes what it is told, and a disk has a manifest that says so.
"""

from collections.abc import Hashable

# So many deletions are known of an owner at a time, by the sessions it may have.
EACH = 16


class Deleted:
    """Seconds since 1970, as the front door has stamped deletions and requests."""

    def __init__(self, most: int, keep_s: float) -> None:
        """most: of one owner, the oldest of whose are forgotten beyond that. keep_s: for how long,
        longer than any request takes."""
        self._most, self._keep_s = most, keep_s
        self._at: dict[str, dict[Hashable, float]] = {}  # by owner, the latest at the end

    def note(self, owner: str, name: Hashable, at: float) -> None:
        mine = self._at.setdefault(owner, {})
        mine[name] = max(at, mine.pop(name, at))
        if len(mine) > self._most:
            del mine[next(iter(mine))]

    def since(self, owner: str, name: Hashable, arrived: float) -> bool:
        """Whether it was deleted when a request that arrived then was there already."""
        return self._at.get(owner, {}).get(name, float("-inf")) >= arrived

    def sweep(self, now: float) -> None:
        for owner, mine in list(self._at.items()):
            for name in [name for name, at in mine.items() if at + self._keep_s <= now]:
                del mine[name]
            if not mine:
                del self._at[owner]
