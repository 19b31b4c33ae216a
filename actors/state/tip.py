"""The newest state of a sequence, wherever it stands: what a session goes on from.

A prefix hit ends on the 64-token grid. A tip ends where the last step ended: whole pages, the rows
of the page that has begun, and the KDA state at that very position (kv-state 3.2, move-lossless).
"""

from collections.abc import Sequence
from dataclasses import dataclass

from expertmesh.actors.model.batch import PAGE_TOKENS
from expertmesh.actors.state.item import Kind, Name
from expertmesh.actors.state.keys import extend, grow


@dataclass(frozen=True, slots=True)
class Tip:
    """position: tokens in the state. keys: of the whole pages below. key: of the snapshot and, off
    the grid, of the page that has begun. switches: see keys.extend."""

    position: int
    switches: tuple[int, ...]
    keys: tuple[bytes, ...]
    key: bytes

    @classmethod
    def of(
        cls,
        root: bytes,
        tokens: Sequence[int],
        position: int,
        switches: Sequence[int],
        known: Sequence[bytes] = (),
    ) -> "Tip":
        """tokens: at least `position` of them. known: keys of their first pages, made before."""
        pages = position // PAGE_TOKENS
        keys = list(known[:pages])
        grow(keys, root, tokens, pages, switches)
        parent = keys[-1] if keys else root
        begun = tokens[len(keys) * PAGE_TOKENS : position]
        key = extend(parent, begun, position, switches) if begun else parent
        return cls(position, tuple(switches), tuple(keys), key)

    @property
    def begun(self) -> int:
        """Tokens in the page that is not full."""
        return self.position % PAGE_TOKENS

    @property
    def pages(self) -> list[Name]:
        """The whole pages."""
        return [Name(key, Kind.PAGE) for key in self.keys]

    @property
    def end(self) -> list[Name]:
        """What belongs to this very position: the page that has begun, and the snapshot."""
        begun = [Name(self.key, Kind.PAGE)] if self.begun else []
        return [*begun, Name(self.key, Kind.SNAPSHOT)]

    @property
    def names(self) -> list[Name]:
        return self.pages + self.end


def onward(switches: Sequence[int], position: int) -> list[int]:
    """Switches of a prompt that goes on from a tip at `position`.

    A prompt that starts off the grid is computed in other chunks than one that runs through, so
    this too is a change of path: to decode, for no token, and back.
    """
    if len(switches) % 2:
        return [*switches, position]
    return [*switches, position, position] if position % PAGE_TOKENS else [*switches]
