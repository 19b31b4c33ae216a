"""Which tokens of which sequences the next step computes. Decides only; touches no tensor.

Every request gets a rank when it arrives: its arrival step plus ageing_steps per level of
priority. Everything follows that one order, and it never changes: who is admitted first, whose
prompt gets the budget first, and, from the other end, who makes room when pages run out.

Bounds. The running sequence of the smallest rank is never preempted for pages, and alone it always
fits (validation.check_request), so every step computes something and it finishes. At most
max_bypass later requests start before one that waits for pages. A sequence is readmitted only with
head room that doubles with each preemption, so a sequence of n pages is preempted for pages about
log2(n) times before it waits until it fits whole. For room for old pages the same holds.
"""

from bisect import bisect_left, insort
from dataclasses import dataclass, field

from expertmesh.actors.attention.sequence import NO_SLOT, Sequence
from expertmesh.actors.attention.settings import EngineSettings
from expertmesh.actors.attention.validation import peak_tokens
from expertmesh.actors.model.batch import PAGE_TOKENS
from expertmesh.actors.state.cache import StateCache
from expertmesh.actors.state.offload.room import Far, OffloadRoom
from expertmesh.actors.state.pages import Pool, pages_for
from expertmesh.actors.state.plain_cache import PlainCache

AGED_LEVELS = 8
# How many of those who wait for a slot have their state loaded meanwhile.
PREPARED = 4


@dataclass(slots=True)
class Plan:
    """admitted: sequences whose slot and pages must be zeroed first. decode: one row each. prefill:
    the tokens computed..chunk_end of each prompt. In rank order. grown: pages that others got
    besides, which must be zeroed, too."""

    admitted: list[Sequence] = field(default_factory=list)
    decode: list[Sequence] = field(default_factory=list)
    prefill: list[Sequence] = field(default_factory=list)
    grown: list[int] = field(default_factory=list)


class Scheduler:
    """waiting and running are sorted by rank; a sequence is in one of them, or gone."""

    def __init__(
        self,
        settings: EngineSettings,
        cache: StateCache | PlainCache,
        slots: Pool,
        near_pages: int = 0,
        room: OffloadRoom | None = None,
    ) -> None:
        """near_pages: most on the device of a sequence whose old pages leave it. room: for those;
        None where none do."""
        self.settings, self.cache, self.slots = settings, cache, slots
        self.room = OffloadRoom(settings.state, None) if room is None else room
        self.pages = cache.pages
        self.waiting: list[Sequence] = []
        self.running: list[Sequence] = []
        self.preemptions = 0
        self._cell = min(PAGE_TOKENS, settings.step_tokens)
        self._near_pages = near_pages
        self._watermark = max(1, int(settings.watermark * self.pages.size))

    def due(self, step: int, priority: int) -> int:
        """The first half of a rank: when a request that arrives at `step` is due."""
        level = max(-AGED_LEVELS, min(AGED_LEVELS, priority))
        return step + level * self.settings.ageing_steps

    def plan(self) -> Plan:
        """One step in four passes: grow, admit, decode, prefill."""
        plan, running, before = Plan(), self.running, self.preemptions

        # Grow: a page for each sequence whose next token opens one. The least urgent make room.
        at = 0
        while at < len(running):
            seq = running[at]
            if seq.computed == len(seq.pages) * PAGE_TOKENS:
                while seq.slot != NO_SLOT and not self.pages.free:
                    self.preempt(running[-1])
                if seq.slot != NO_SLOT:
                    plan.grown += self._grow(seq, 1)
            if seq.context is not None and seq.slot != NO_SLOT and self._make_room(seq):
                plan.grown += self._grow_context(seq)
            at += seq.slot != NO_SLOT  # else the next one has its place

        # Admit: in rank order. Who fits may pass who does not, a bounded number of times; whose
        # state is still being loaded holds no page and is passed freely. Pages that were just taken
        # from someone are not handed to the next in line at once.
        if self.preemptions == before:
            passed: list[Sequence] = []
            for at, seq in enumerate(self.waiting[: self.settings.lookahead]):
                if not self.slots.free and not self._may_evict_for(seq):
                    for ahead in self.waiting[at : at + PREPARED]:
                        self.cache.prepare(ahead, first=ahead is self.waiting[0])
                    break
                shared = self.cache.attach(seq, first=at == 0)
                if shared is None:
                    continue
                need, room = self._pages_to_start(seq)
                room, far = room - shared, self._far_to_start(seq)
                if not self._fits(seq, room, far) and not self._evict_for(seq, room, far):
                    self.cache.detach(seq)
                    if not self.slots.free or seq.bypassed >= self.settings.max_bypass:
                        break
                    passed.append(seq)
                    continue
                self.room.hold(seq.number, self._far(seq, len(seq.tokens)))
                if seq.context is not None:
                    seq.context.settle(self.room.on_disk(seq.number))
                seq.slot = self.slots.take(seq.number, 1)[0]
                seq.pages = self.cache.pages_of(seq, need)
                del self.waiting[bisect_left(self.waiting, seq)]
                insort(running, seq)
                plan.admitted.append(seq)
                for other in passed:
                    other.bypassed += 1
                if any(other.bypassed >= self.settings.max_bypass for other in passed):
                    break

        # Decode: a row for every sequence past its prompt, new or replayed.
        # Prefill: the rest of the budget. At first nobody gets more than half of it, so that a
        # long prompt cannot hold up short ones; what they leave goes by rank.
        prompts: list[Sequence] = []
        for seq in running:
            (plan.decode if seq.computed >= seq.prompt_len else prompts).append(seq)
            seq.chunk_end = seq.computed
        left = max(self.settings.step_tokens - len(plan.decode), self._cell)
        for share in (max(left // 2, self._cell), left):
            for seq in prompts:
                end = self._chunk_end(seq, min(share, left))
                left -= end - seq.chunk_end
                seq.chunk_end = end
        plan.prefill = [seq for seq in prompts if seq.chunk_end > seq.computed]
        return plan

    def _make_room(self, seq: Sequence) -> bool:
        """For what leaves the device up to its newest token. The least urgent of those who have
        some make room; False: that was the sequence itself."""
        while not self.room.hold(seq.number, self._far(seq, len(seq.tokens))):
            last = next(o for o in reversed(self.running) if o is seq or self.room.held(o.number))
            self.preempt(last)
            if last is seq:
                return False
        return True

    def _grow(self, seq: Sequence, count: int) -> list[int]:
        more = self.pages.take(seq.number, count)
        seq.pages += more
        return more

    def _grow_context(self, seq: Sequence) -> list[int]:
        """A prompt gets pages for its next chunk, as far as there are any: those that left the
        device have given theirs back."""
        wanted = pages_for(len(seq.tokens)) - len(seq.pages)
        room = min(self._near_pages - len(seq.near), self.pages.free)
        return self._grow(seq, max(0, min(wanted, room)))

    def _chunk_end(self, seq: Sequence, budget: int) -> int:
        """Where a chunk of at most `budget` more tokens ends: at the prompt's end or on the grid.

        The grid is the multiples of 64 (of step_tokens within each 64 when that is smaller). It
        does not depend on companions, so neither do the bits of the result.
        """
        if seq.prompt_logprobs is not None:  # a logits row per token: keep them few
            budget = min(budget, seq.computed + PAGE_TOKENS - seq.chunk_end)
        if seq.context is not None:  # whose pages come as others leave
            budget = min(budget, len(seq.pages) * PAGE_TOKENS - seq.chunk_end)
        end = seq.chunk_end + budget
        if end >= seq.prompt_len:
            return seq.prompt_len
        block = end // PAGE_TOKENS * PAGE_TOKENS
        return max(seq.chunk_end, block + (end - block) // self._cell * self._cell)

    def _pages_to_start(self, seq: Sequence) -> tuple[int, int]:
        """Pages that it needs, and with head room: those that it shares among them. Never more than
        the sequence's peak, so that what check_request let in fits when nothing else runs."""
        need = pages_for(len(seq.tokens))
        peak = pages_for(peak_tokens(seq.prompt_len, seq.params.max_tokens))
        if seq.context is not None:
            need -= len(seq.context.leaving(seq.computed))
            need, peak = min(need, self._near_pages), min(peak, self._near_pages)
        return need, min(peak, need + (self._watermark << min(seq.preemptions, 32)))

    def _far(self, seq: Sequence, tokens: int) -> Far:
        """Its old pages, until so many tokens are computed."""
        return Far() if seq.context is None else self.room.far_of(seq.context, tokens)

    def _far_to_start(self, seq: Sequence) -> Far:
        """For the tokens that it has, with head room as for pages."""
        peak = peak_tokens(seq.prompt_len, seq.params.max_tokens)
        head = PAGE_TOKENS << min(seq.preemptions, 32)
        return self._far(seq, min(peak, len(seq.tokens) + head))

    def _fits(self, seq: Sequence, room: int, far: Far) -> bool:
        return bool(self.slots.free) and room <= self.pages.free and self.room.fits(seq.number, far)

    def _may_evict_for(self, seq: Sequence) -> bool:
        """Whether somebody running could make way, before anything is looked up for `seq`."""
        return self.settings.priority_preemption and any(
            other.priority > seq.priority for other in self.running
        )

    def _evict_for(self, seq: Sequence, room: int, far: Far) -> bool:
        """Preempts running sequences of lower priority and later rank if that lets `seq` start.

        A sequence that has waited long enough has the earlier rank and cannot be evicted.
        """
        if not self.settings.priority_preemption:
            return False
        slots, pages, victims = self.slots.free, self.pages.free, list[Sequence]()
        fits = self.room.fits(seq.number, far)
        for other in reversed(self.running):
            enough = slots and pages >= room
            if other < seq or (enough and fits):
                break
            if other.priority > seq.priority and (not enough or self.room.held(other.number)):
                victims.append(other)
                slots += 1
                pages += self.pages.would_free(other.number, other.near)
                fits = self.room.fits(seq.number, far, [one.number for one in victims])
        if not slots or pages < room or not fits:
            return False
        for other in victims:
            self.preempt(other)
        return True

    def add(self, seq: Sequence) -> None:
        insort(self.waiting, seq)

    def preempt(self, seq: Sequence) -> None:
        """Takes everything from a running sequence; it queues again at its old rank."""
        seq.high_water = max(seq.high_water, seq.computed)
        self._release(seq)
        self.cache.reopen(seq)
        seq.preemptions += 1
        self.preemptions += 1
        insort(self.waiting, seq)

    def remove(self, seq: Sequence) -> None:
        """The sequence leaves for good, wherever it is."""
        if seq.slot != NO_SLOT:
            self._release(seq)
        else:
            del self.waiting[bisect_left(self.waiting, seq)]
        self.cache.close(seq)

    def _release(self, seq: Sequence) -> None:
        del self.running[bisect_left(self.running, seq)]
        self.pages.give_back(seq.number, seq.near)
        if seq.context is not None:
            seq.context = seq.context.again()
        self.room.let_go(seq.number)
        self.slots.give_back(seq.number, [seq.slot])
        seq.slot, seq.pages, seq.computed = NO_SLOT, [], 0
