"""How many workers there should be, and what is known of the seats that nobody sits in."""

import threading
from collections.abc import Callable

from expertmesh.cluster.assembly import Assembly
from expertmesh.cluster.membership import Bundle, Kind, Worker
from expertmesh.cluster.ranks import Share


class Seats:
    """Belongs to the controller and is guarded by its lock, but for the wishes.

    A seat is a label such as "expert-2". Whoever is lost is owed a successor in the same seat, who
    is called again and again; a seat that was only wished for is given up with the first failure.
    """

    def __init__(self, mesh: Assembly, give_back: Callable[[Bundle], bool]) -> None:
        """give_back: frees a place; False when it stays reserved."""
        self._mesh, self._give_back = mesh, give_back
        self.wishes = threading.RLock()  # guards `desired`; innermost
        self.desired: dict[Kind, int] = {
            "attention": len(mesh.attention),
            "expert": len(mesh.ranks.workers),
        }
        self.filling: dict[str, Kind] = {}
        self.promised: dict[str, Share] = {}  # what will be held in seats that are being filled
        self.tries: dict[str, int] = {}  # attempts to replace the lost worker of a seat
        self.given_up: dict[str, Kind] = {}  # left alone for a while, after many attempts
        self.leaving: set[Worker] = set()
        self.released: list[Worker] = []  # they end as soon as there is an epoch without them
        self.bundles = {worker.seat: worker.bundle for worker in mesh.workers}

    def here(self, kind: Kind) -> list[Worker]:
        """Those who are to stay."""
        return [w for w in self._mesh.workers if w.kind == kind and w not in self.leaving]

    def coming(self, kind: Kind) -> int:
        return [*self.filling.values(), *self.given_up.values()].count(kind)

    def short(self, kind: Kind) -> int:
        """How many more are wanted than are here or on their way; negative: fewer."""
        return self.desired[kind] - len(self.here(kind)) - self.coming(kind)

    def taken(self) -> set[str]:
        """Seats with somebody in them, or on the way there, or that are left alone."""
        here = {worker.seat for worker in [*self._mesh.workers, *self.released]}
        return here | self.filling.keys() | self.given_up.keys()

    def owed(self, kind: Kind) -> list[str]:
        """Seats whose worker was lost and that nobody has been called for."""
        taken = self.taken()
        return [seat for seat in self.tries if seat.startswith(f"{kind}-") and seat not in taken]

    def claim(self, kind: Kind) -> str:
        """The seat to fill next, which counts as being filled from now on."""
        taken, owed = self.taken(), self.owed(kind)
        free = (s for i in range(len(taken) + 1) if (s := f"{kind}-{i}") not in taken)
        seat = owed[0] if owed else next(free)
        self.filling[seat] = kind
        return seat

    def sit(self, worker: Worker) -> None:
        self.filling.pop(worker.seat, None)
        self.promised.pop(worker.seat, None)
        self.bundles[worker.seat] = worker.bundle

    def miss(self, kind: Kind, seat: str) -> bool:
        """Nobody came. Whether the seat is owed to a lost worker's successor; else the wish is
        withdrawn, unless it has been already."""
        self.filling.pop(seat, None)
        self.promised.pop(seat, None)
        if seat in self.tries:
            self.tries[seat] += 1
            return True
        with self.wishes:
            if self.short(kind) > len(self.owed(kind)):
                self.desired[kind] -= 1
        self.vacate(seat)
        return False

    def lose(self, worker: Worker) -> None:
        """The worker is gone. One that was to leave anyway is owed nobody."""
        if worker in self.leaving:
            self.leaving.discard(worker)
            self.vacate(worker.seat)
        else:
            self.tries.setdefault(worker.seat, 0)

    def vacate(self, seat: str) -> None:
        """Gives the seat's place back. One that cannot be freed waits for the next in this seat."""
        bundle = self.bundles.get(seat)
        if bundle is not None and self._give_back(bundle):
            del self.bundles[seat]

    def forget_surplus(self, kind: Kind) -> None:
        """Fewer are wanted than when workers of these seats were lost."""
        for seat in self.owed(kind):
            del self.tries[seat]
            self.vacate(seat)

    def forgive(self) -> None:
        """Whoever asks again means it."""
        self.given_up.clear()
        self.tries = dict.fromkeys(self.tries, 0)
