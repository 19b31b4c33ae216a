"""One item in host memory, and what is known of its use."""

from dataclasses import dataclass, field
from enum import Enum, auto

from expertmesh.actors.state.item import Header, Kind, Name
from expertmesh.actors.state.tiers.content import Content


class State(Enum):
    """absent -> WRITING -> COMMITTED -> EVICTING -> absent (kv-state 3.6); absent is no entry, and
    pinned a mark on a committed one."""

    WRITING = auto()  # taken over, not packed yet; readable
    COMMITTED = auto()
    EVICTING = auto()  # leaves as soon as the disk has it; readable until then


@dataclass(slots=True, eq=False)
class Entry:
    """nbytes: what the tier counts for it. holders: reads and disk writes under way, which need the
    bytes to stay. durable: owed to the disk. below: the snapshot before it on
    the chain. last: when it was used last, on the clock of its side. uses: since it is here."""

    header: Header
    content: Content
    nbytes: int
    state: State = State.WRITING
    holders: int = 0
    pinned: bool = False
    durable: bool = False
    below: Name | None = None
    last: int = 0
    uses: int = 0
    name: Name = field(init=False)
    parent: Name | None = field(init=False)  # the page without which this item is of no use

    def __post_init__(self) -> None:
        header = self.header
        self.name, self.parent = header.name, None
        if header.kind is Kind.PAGE:
            self.parent = Name(header.parent, Kind.PAGE)
        elif header.kind is Kind.SNAPSHOT:
            self.parent = Name(header.key, Kind.PAGE)
