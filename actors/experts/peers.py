"""Another expert actor, reached through Ray."""

from typing import Any

import ray
from ray.actor import ActorHandle
from ray.exceptions import GetTimeoutError, RayError, RayTaskError

from expertmesh.actors.experts.transfer import Packet, Peer, TransferError


class RayPeer:
    """The packet comes as a plain method result: through shared memory on one host."""

    def __init__(self, handle: ActorHandle[Any], name: str = "") -> None:
        self._handle = handle
        self.name = name or f"actor {handle._actor_id.hex()[:12]}"

    def give(self, layer: int, expert: int, timeout_s: float) -> Packet:
        call: Any = self._handle.give.remote(layer, expert)
        try:
            packet: Packet = ray.get(call, timeout=timeout_s)
        except GetTimeoutError:
            raise self._error(layer, expert, f"no answer within {timeout_s:.3g} s") from None
        except RayTaskError as error:
            raise self._error(layer, expert, str(error.cause)) from None
        except RayError as error:
            raise self._error(layer, expert, str(error).split("\n", 1)[0]) from None
        return packet

    def _error(self, layer: int, expert: int, reason: str) -> TransferError:
        return TransferError(layer, expert, self.name, reason)


def peer_of(source: ActorHandle[Any] | Peer, name: str) -> Peer:
    """A Ray handle or, within one process, anything that gives."""
    return RayPeer(source, name) if isinstance(source, ActorHandle) else source
