"""What the cold tier's thread is told, and how it does it."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum, auto

from expertmesh.actors.state.codec.packed import Packed
from expertmesh.actors.state.disk.errors import DiskFailed, DiskFull
from expertmesh.actors.state.disk.log import DiskLog
from expertmesh.actors.state.item import Header, Name
from expertmesh.actors.state.tiers.fetch import StoreFetch


class Verb(Enum):
    WRITE = auto()
    PIN = auto()
    UNPIN = auto()
    REMOVE = auto()
    LOOK = auto()


@dataclass(slots=True, eq=False)
class Order:
    """packed: where host memory keeps less than the disk shall have. Filled in when its turn comes:
    header, packed and pinned of what is written, and for each name the ticket of what is owed.
    waiters: of a look. failed: why this order alone was not carried out."""

    verb: Verb
    names: Sequence[Name] = ()
    packed: Packed | None = None
    header: Header | None = None
    pinned: bool = False
    tickets: list[int] = field(default_factory=list)
    waiters: list[StoreFetch] = field(default_factory=list)
    failed: str = ""


def carry_out(log: DiskLog, group: Sequence[Order]) -> str:
    """All orders and one sync. Returns why the whole group failed, "" when it did not; each order's
    `failed` says why it alone did. Blocks as long as the disk does."""
    expected: list[Order] = []
    try:
        for order in group:
            order.failed = ""
            try:
                if _apply(log, order):
                    expected.append(order)
            except DiskFull as error:
                order.failed = error.reason
        durable = set(log.sync())
    except DiskFailed as error:
        return error.reason
    for order in expected:
        if not durable.issuperset(order.names):
            order.failed = "io"
    return ""


def _apply(log: DiskLog, order: Order) -> bool:
    """Whether the sync has to confirm it by name."""
    if order.verb is Verb.WRITE:
        packed, header = order.packed, order.header
        assert packed is not None and header is not None
        return log.append(
            header, packed.codec, packed.raw_bytes, packed.buffers(), pinned=order.pinned
        )
    if order.verb is Verb.PIN:
        _pin(log, order)
    elif order.verb is Verb.UNPIN:
        log.unpin(order.names)
    elif order.verb is Verb.REMOVE:
        log.remove(order.names)
    else:
        log.refresh()
    return False


def _pin(log: DiskLog, order: Order) -> None:
    """What only another replica's folder has is copied: its owner may evict it."""
    for name in log.pin(order.names):
        record = log.read(name)
        if record is None:
            order.failed = "missing"
        else:
            log.append(record.header, record.codec, record.raw_bytes, [record.payload], pinned=True)
