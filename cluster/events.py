"""What the controller hears of: facts, in the order in which they reach it."""

from typing import NamedTuple

from expertmesh.cluster.membership import Kind, Worker


class WorkerLost(NamedTuple):
    """The process died, fell silent or is stuck."""

    worker: Worker
    reason: str


class EpochBroken(NamedTuple):
    """Ranks of the epoch cannot reach each other, though all of them live."""

    epoch: int
    reason: str


class Joined(NamedTuple):
    """A new worker has loaded its share and waits for an epoch with it."""

    worker: Worker


class AttemptFailed(NamedTuple):
    """A worker for the seat did not come up; there may be further attempts."""

    seat: str
    reason: str


class NotJoined(NamedTuple):
    """The attempts to fill the seat have been given up."""

    kind: Kind
    seat: str
    reason: str


class Drained(NamedTuple):
    """Nothing depends on this worker any more: it may go."""

    worker: Worker


class Retry(NamedTuple):
    """A moment has passed since the last attempt to make an epoch failed."""


class Wished(NamedTuple):
    """Somebody has asked for another number of workers, or for the same again."""


class TryAgain(NamedTuple):
    """A seat that could not be filled has been left alone for long enough."""

    seat: str


Event = (
    AttemptFailed
    | WorkerLost
    | EpochBroken
    | Joined
    | NotJoined
    | Drained
    | Retry
    | Wished
    | TryAgain
)
