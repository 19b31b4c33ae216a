"""Who owns which page of the latent cache and which KDA slot: two pools, one rule.

A page holds PAGE_TOKENS tokens of the MLA latents; a slot holds one sequence's KDA matrices and
conv windows. Both are numbered things of a fixed count that belong to at most one sequence. The
pools only count: zeroing a slot for its new owner is the engine's step (ModelState.zero_slot).
"""

from heapq import heappop, heappush

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

    def owned_by(self, owner: int) -> list[int]:
        """All numbers of one owner, ascending. O(size): for checks, not for the step."""
        return [number for number, who in enumerate(self._owner) if who == owner]
