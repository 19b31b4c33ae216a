"""Work that waits for loads, step by step, on a thread that must not wait."""

from collections.abc import Callable, Generator
from typing import Any, Generic, TypeVar

from expertmesh.actors.state.store import Fetch

Result = TypeVar("Result")
# Yields a fetch to wait for, any number of times, and returns a result.
Steps = Generator[Fetch, None, Result]


class _Errand(Generic[Result]):
    __slots__ = ("done", "failed", "steps", "waits_for")

    def __init__(
        self,
        steps: "Steps[Result]",
        done: Callable[[Result], None],
        failed: Callable[[Exception], None],
    ) -> None:
        self.steps, self.done, self.failed = steps, done, failed
        self.waits_for: Fetch | None = None


class Errands:
    """Everything here belongs to one thread. A fetch ends by its own deadline, so does an errand
    that has a bounded number of them."""

    def __init__(self) -> None:
        self._errands: list[_Errand[Any]] = []

    def __len__(self) -> int:
        return len(self._errands)

    @property
    def ready(self) -> bool:
        """Whether `poll` would get somewhere."""
        return any(each.waits_for is None or each.waits_for.done for each in self._errands)

    def start(
        self,
        steps: "Steps[Result]",
        done: Callable[[Result], None],
        failed: Callable[[Exception], None],
    ) -> None:
        """Goes as far as it can at once. Either callback is called exactly once."""
        errand = _Errand(steps, done, failed)
        self._errands.append(errand)
        self._go(errand)

    def poll(self) -> None:
        """Goes on with those whose fetch is done."""
        for errand in list(self._errands):
            if errand.waits_for is None or errand.waits_for.done:
                self._go(errand)

    def close(self, error: Exception) -> None:
        """Ends all of them with this error."""
        for errand in list(self._errands):
            if errand.waits_for is not None:
                errand.waits_for.cancel()
            errand.steps.close()
            self._end(errand)
            errand.failed(error)

    def _go(self, errand: _Errand[Any]) -> None:
        try:
            errand.waits_for = next(errand.steps)
            while errand.waits_for.done:
                errand.waits_for = next(errand.steps)
        except StopIteration as end:
            self._end(errand)
            errand.done(end.value)
        except Exception as error:
            self._end(errand)
            errand.failed(error)

    def _end(self, errand: _Errand[Any]) -> None:
        errand.waits_for = None
        self._errands.remove(errand)
