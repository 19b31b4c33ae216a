"""The thread that steps an engine, and parks when nobody has work."""

import logging
import threading
from collections.abc import Callable
from time import monotonic

from expertmesh.actors.attention.engine import Engine
from expertmesh.actors.attention.messages import TokenOutput

_log = logging.getLogger(__name__)


def _nobody() -> bool:
    return False


class EngineLoop:
    """Steps `engine` and hands each step's outputs to `publish`, in the loop's thread.

    peers_open: whether another rank of the mesh has opened a step that this one must join, with
    rows or without; whoever makes it true calls `wake`. Without work the thread waits for an
    event: no polling, no step, no collective. While there may be sessions it also looks now and
    then what time has brought.
    """

    def __init__(
        self,
        engine: Engine,
        publish: Callable[[list[TokenOutput]], None],
        *,
        peers_open: Callable[[], bool] = _nobody,
    ) -> None:
        self.engine = engine
        self._publish, self._peers_open = publish, peers_open
        self._stopping = False
        self._busy_since: float | None = None
        self._thread = threading.Thread(target=self._main, name="engine-loop", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def wake(self) -> None:
        """There may be something to do. From any thread."""
        self.engine.arrived.set()

    def stop(self, timeout: float = 10.0) -> None:
        """Ends the thread after the step in progress; requests still in it end with an error.

        Raises TimeoutError when that step does not end in time.
        """
        self._stopping = True
        self.wake()
        self._thread.join(timeout)
        if self._thread.is_alive():
            raise TimeoutError(f"the engine's step has not ended within {timeout} s")
        self._send(self.engine.fail("the engine was stopped"))

    @property
    def failed(self) -> str | None:
        return self.engine.failed

    def seconds_in_step(self) -> float:
        """How long the present step has been running; 0 between steps. For the health check."""
        since = self._busy_since
        return 0.0 if since is None else monotonic() - since

    def _main(self) -> None:
        try:
            self._step_until_stopped()
        except Exception as error:  # a thread that dies in silence leaves every reader waiting
            _log.exception("the engine loop broke")
            self._send(self.engine.fail(f"engine loop: {type(error).__name__}: {error}"))

    def _step_until_stopped(self) -> None:
        engine = self.engine
        while not self._stopping:
            engine.arrived.wait(engine.patience)
            engine.arrived.clear()  # before looking: what arrives after this sets it again
            while not self._stopping and (engine.has_work or self._peers_open()):
                self._busy_since = monotonic()
                self._send(engine.step() if engine.has_work else engine.join_step())
                self._busy_since = None
                if engine.failed is not None:
                    _log.error("engine failed: %s", engine.failed)
                    break

    def _send(self, outputs: list[TokenOutput]) -> None:
        if not outputs:
            return
        try:
            self._publish(outputs)
        except Exception as error:
            # Tokens are lost, so no request may go on as if they had been sent.
            _log.exception("publishing failed")
            reason = f"publishing failed: {type(error).__name__}: {error}"
            try:
                self._publish(self.engine.fail(reason))
            except Exception:
                _log.exception("publishing the failure failed")
