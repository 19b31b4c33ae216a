"""The control of every mode that reads old tokens only in part: old tokens that nothing is read of.

Where a model answers right all the same, its answer came through the recurrent state, and a mode
that loses nothing there has shown nothing.
"""

from expertmesh.actors.attention.engine import Engine
from expertmesh.actors.attention.sequence import Sequence
from expertmesh.actors.model.batch import PAGE_TOKENS
from expertmesh.actors.state.cache import StateCache


class Blind:
    """Zeroes the latents of old pages between the end of a text and what is asked after it. Sinks
    and the window before the end stay. To be called after every step; one engine."""

    def __init__(self, sinks: int, window: int) -> None:
        self._first, self._window = sinks // PAGE_TOKENS, window
        self._done: set[str] = set()

    def __call__(self, engine: Engine) -> None:
        running = engine.scheduler.running
        if not running and self._done:
            self._done.clear()
            if isinstance(engine.cache, StateCache):
                engine.cache.evict()  # what is left has names that promise other bytes
        latents = engine.state.latents
        # Not before all have read the text: they share its pages.
        if all(seq.generated for seq in running):
            for seq in running:
                if seq.id not in self._done:
                    self._done.add(seq.id)
                    latents.view(len(latents), -1, PAGE_TOKENS, latents.shape[2])[
                        :, self._old(seq)
                    ] = 0

    def _old(self, seq: Sequence) -> list[int]:
        end = (seq.prompt_len - self._window) // PAGE_TOKENS
        return seq.pages[self._first : max(self._first, end)]
