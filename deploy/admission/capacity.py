"""How many choices the engines are given at once."""

import asyncio
import logging
import math
import time
from collections import deque
from collections.abc import Awaitable, Callable, Mapping

from expertmesh.actors.attention.messages import EngineStats

_log = logging.getLogger(__name__)

# Choices per state slot: one that runs, and one at hand when it ends. What waits beyond that waits
# here, where it is fair between keys.
PER_SLOT = 2
LOOK_SECONDS = 2.0
ANSWER_SECONDS = 2.0
# An engine that is too busy to answer is left out of the statistics, so the most of some looks.
_LOOKS = 5


class Capacity:
    """A fixed number, or PER_SLOT times the engines' state slots, which follows scaling.

    limit: math.inf where the engines report no slots. known: whether they have been asked. fixed:
    they need not be.
    """

    def __init__(
        self,
        fixed: int | None,
        stats: Callable[[], Awaitable[Mapping[str, EngineStats | None]]],
        period: float = LOOK_SECONDS,
    ) -> None:
        """period: seconds between two looks."""
        self._stats, self.period = stats, period
        self.limit = math.inf if fixed is None else fixed
        self.known = fixed is not None
        self.fixed = fixed is not None
        self._seen: deque[int] = deque(maxlen=_LOOKS)
        self._looked = -math.inf

    @property
    def stale(self) -> bool:
        """Whether it is time to look again."""
        return not self.fixed and time.monotonic() - self._looked >= self.period

    async def look(self) -> None:
        """Asks the engines. What they do not answer leaves the limit as it was."""
        self._looked = time.monotonic()
        try:
            async with asyncio.timeout(ANSWER_SECONDS):
                stats = await self._stats()
            self._seen.append(sum(one.slots_total for one in stats.values() if one is not None))
            self.limit = PER_SLOT * max(self._seen) or math.inf
        except TimeoutError:
            pass
        except Exception:  # requests wait for this answer: they must not wait for ever
            _log.exception("the engines' statistics can not be read")
        self.known = True
