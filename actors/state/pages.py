"""Who owns which page of the latent cache and which KDA slot: pools, one rule.

A page holds PAGE_TOKENS tokens of the MLA latents; a slot holds one sequence's KDA matrices and
conv windows. Both are numbered things of a fixed count that belong to at most one sequence. The
pools only count: zeroing a slot for its new owner is the engine's step (ModelState.zero_slot).
"""

from collections import OrderedDict
from collections.abc import Callable, Iterable
from heapq import heappop, heappush
from itertools import islice, takewhile

from expertmesh.actors.model.batch import PAGE_TOKENS

NOBODY = -1


class OwnershipError(RuntimeError):
    """A page or slot was taken beyond the free ones, or handed back by someone who lacks it.

    Always a bug of the caller: two sequences that write one page mix their answers silently.
    """


def pages_for(tokens: int) -> int:
    """Pages that hold this many tokens. The only place where tokens become pages."""
    return -(-tokens // PAGE_TOKENS)


class Pool:
    """Numbers 0..size-1, each free or owned by one sequence. take and give_back are O(count).

    compact: hand out the lowest free numbers (O(count log size)), so that those in use stay close
    together: KDA kernels update a run of neighbouring slots in place, without a gather.
    """

    def __init__(self, kind: str, size: int, *, compact: bool = False) -> None:
        if size < 1:
            raise ValueError(f"{kind}s: {size} is not a positive count")
        self.kind, self.size = kind, size
        # A heap of the lowest, or a stack: the last used is the warmest.
        self._free = list(range(size)) if compact else list(range(size - 1, -1, -1))
        self._compact = compact
        self._owner = [NOBODY] * size

    @property
    def free(self) -> int:
        return len(self._free)

    def take(self, owner: int, count: int) -> list[int]:
        """`count` numbers, now owned by `owner` (any integer >= 0). Raises OwnershipError."""
        if not 0 <= count <= len(self._free):
            raise OwnershipError(
                f"sequence {owner} asks for {count} {self.kind}s, {len(self._free)} are free"
            )
        free = self._free
        taken = [heappop(free) if self._compact else free.pop() for _ in range(count)]
        for number in taken:
            if self._owner[number] != NOBODY:
                raise OwnershipError(
                    f"{self.kind} {number} is on the free list and owned by {self._owner[number]}"
                )
            self._owner[number] = owner
        return taken

    def give_back(self, owner: int, numbers: list[int]) -> None:
        """Frees what `owner` took. Raises OwnershipError on a double free or a foreign number."""
        for number in numbers:
            if self._owner[number] != owner:
                raise OwnershipError(
                    f"sequence {owner} frees {self.kind} {number}, owner {self._owner[number]}"
                )
            self._owner[number] = NOBODY
            if self._compact:
                heappush(self._free, number)
            else:
                self._free.append(number)

    def alone(self, owner: int, number: int) -> bool:
        """Whether `owner` has it and nobody else can."""
        return self._owner[number] == owner

    def owned_by(self, owner: int) -> list[int]:
        """All numbers of one owner, ascending. O(size): for checks, not for the step."""
        return [number for number, who in enumerate(self._owner) if who == owner]


class SharedPool(Pool):
    """Pages that may be read by several sequences and stay when nobody uses them. now: the time of
    whoever sets it, by which `take_older` goes.

    A page is written by the one sequence that took it. Once `keep` says that its content is known
    by a name it is never written again: others `share` it, and when its last user gives it back
    it lies idle, still known. Idle pages count as free: the one longest idle is forgotten when
    `take` needs room. Those given back together become idle last first, so that the end of a prefix
    goes before its beginning.
    """

    def __init__(self, kind: str, size: int, forgotten: Callable[[int], None]) -> None:
        """forgotten(page): its content is about to be lost; may `forget` others. Not called by
        `forget`."""
        super().__init__(kind, size)
        self._forgotten = forgotten
        self._users: list[set[int]] = [set() for _ in range(size)]
        self._kept: set[int] = set()
        self._idle: OrderedDict[int, int] = OrderedDict()  # since when
        self.now = 0

    @property
    def free(self) -> int:
        return len(self._free) + len(self._idle)

    @property
    def idle(self) -> int:
        return len(self._idle)

    def take(self, owner: int, count: int) -> list[int]:
        """`count` pages for `owner` alone, idle ones among them when there are no others. Raises
        OwnershipError."""
        if not 0 <= count <= self.free:
            raise OwnershipError(
                f"sequence {owner} asks for {count} {self.kind}s, {self.free} are free"
            )
        self.forget_idle(count - len(self._free))
        taken = [self._free.pop() for _ in range(count)]
        for page in taken:
            if self._users[page]:
                raise OwnershipError(f"{self.kind} {page} is free and used by {self._users[page]}")
            self._users[page].add(owner)
        return taken

    def take_older(self, owner: int, count: int, time: int) -> list[int] | None:
        """As `take`, of free pages and of those that lie idle since before that time. None, and
        all stays as it was, where there are not so many."""
        older = takewhile(lambda since: since < time, self._idle.values())
        if len(self._free) + sum(1 for _ in islice(older, count)) < count:
            return None
        return self.take(owner, count)

    def share(self, owner: int, pages: Iterable[int]) -> None:
        """`owner` reads these known pages too. Raises OwnershipError."""
        for page in pages:
            if page not in self._kept or owner in self._users[page]:
                raise OwnershipError(f"sequence {owner} cannot share {self.kind} {page}")
            self._idle.pop(page, None)
            self._users[page].add(owner)

    def keep(self, page: int) -> None:
        """Its content is known by a name from now on."""
        if not self._users[page]:
            raise OwnershipError(f"{self.kind} {page} belongs to nobody")
        self._kept.add(page)

    def forget(self, page: int) -> None:
        """Its content is known no more; whoever uses it goes on."""
        self._kept.discard(page)
        if page in self._idle:
            del self._idle[page]
            self._free.append(page)

    def forget_idle(self, count: int) -> int:
        """Forgets `count` idle pages if there are so many, the longest idle first, and those that
        are worth nothing without them; how many there were."""
        before = len(self._free)
        while self._idle and len(self._free) < before + count:
            page, _ = self._idle.popitem(last=False)
            self._kept.discard(page)
            self._forgotten(page)
            self._free.append(page)
        return len(self._free) - before

    def touch(self, pages: Iterable[int]) -> None:
        """As if idle pages had been given back just now."""
        for page in pages:
            if page in self._idle:
                self._idle[page] = self.now
                self._idle.move_to_end(page)

    def give_back(self, owner: int, numbers: list[int]) -> None:
        for page in reversed(numbers):
            if owner not in self._users[page]:
                raise OwnershipError(f"sequence {owner} frees {self.kind} {page} and has it not")
            self._users[page].discard(owner)
            if self._users[page]:
                continue
            if page in self._kept:
                self._idle[page] = self.now
            else:
                self._free.append(page)

    def alone(self, owner: int, page: int) -> bool:
        """Whether nobody else reads it or could find it."""
        return page not in self._kept and self._users[page] == {owner}

    def would_free(self, owner: int, pages: Iterable[int]) -> int:
        """How many of its pages nobody else uses."""
        return sum(self._users[page] == {owner} for page in pages)

    def owned_by(self, owner: int) -> list[int]:
        return [page for page, users in enumerate(self._users) if owner in users]

    def check(self) -> None:
        """Every page is free, idle, or used, and only one of them. Raises OwnershipError."""
        free, idle = set(self._free), set(self._idle)
        used = {page for page, users in enumerate(self._users) if users}
        if len(free) != len(self._free) or free & idle or used & (free | idle):
            raise OwnershipError(f"{self.kind}s: free {free}, idle {idle} and used {used} overlap")
        if len(free) + len(idle) + len(used) != self.size or not idle <= self._kept <= idle | used:
            raise OwnershipError(f"{self.kind}s: {self.size} are not {free}, {idle} and {used}")
