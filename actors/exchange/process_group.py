"""Process groups of one epoch, and the only waits of the exchange.

The control group is always gloo: opening messages are a few bytes in host memory, and a rank that
waits for work must park, which an NCCL kernel cannot. On CPU the same group carries the data.
Every epoch has a store and groups of its own, never torch's global default group, so that the next
epoch can be built beside the running one.
"""

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore, TCPStore
from torch.distributed import ProcessGroupGloo

from expertmesh.actors.exchange.base import ExchangeError
from expertmesh.actors.exchange.rendezvous import Rendezvous, RendezvousStore
from expertmesh.actors.exchange.roster import Roster
from expertmesh.actors.exchange.settings import ExchangeSettings

DATA_TAG, CONTROL_TAG, CLOSE_TAG = 1, 2, 3
# gloo has no wait without a limit, and counts it in nanoseconds: a year is far from overflow.
PARKED = timedelta(days=365)
# An NCCL work is asked whether it is done, as its own wait cannot time out: without a pause at
# first, for a layer's exchange takes less than a pause, then this often.
EAGER_S = 1e-3
POLL_S = 50e-6


@dataclass(frozen=True, slots=True)
class Where:
    """What an error has to say: the peer waited for, and the place in the step."""

    peer: int
    layer: int
    phase: str
    step: int
    group: str = ""  # set where a collective cannot tell which of several peers is missing

    def error(self, reason: str) -> ExchangeError:
        return ExchangeError(self.peer, self.layer, self.phase, self.step, reason)


def open_store(host: str) -> tuple[Rendezvous, tuple[str, int]]:
    """Starts the meeting point of an epoch. Keep the object until all ranks have met."""
    rendezvous = Rendezvous(host)
    return rendezvous, rendezvous.address


class Groups:
    """The process groups of one rank in one epoch."""

    def __init__(
        self,
        roster: Roster,
        rank: int,
        settings: ExchangeSettings,
        device: torch.device,
        host: str,
    ) -> None:
        self.roster, self.rank, self.device = roster, rank, device
        self.deadline = timedelta(seconds=settings.deadline_s)
        self.control: Any
        self.dispatch: Any
        self.combine: Any
        self._closed = False
        self._closing = threading.Lock()
        self.on_close: list[Callable[[], None]] = []
        self.verdict: str | None = None
        meet_s = settings.join_deadline_s if roster.meet_s is None else roster.meet_s
        limit = self.join_deadline = timedelta(seconds=meet_s)
        self.control = self.dispatch = self.combine = None
        where = Where(rank, -1, "join", -1)
        name = roster.name(rank)
        store: RendezvousStore | None = None
        try:
            store = RendezvousStore(roster.store, roster.epoch, name, limit.total_seconds())
            self.store = store
            self.control = self.dispatch = self.combine = _gloo(store, roster, rank, host, limit)
            if device.type == "cuda":
                # Two communicators: on one, a combine waiting for the experts would hold up the
                # dispatch of the next micro-batch behind it.
                self._tcp = tcp = _tcp_store(store, rank, host, limit)
                self.dispatch = _nccl(PrefixStore("dispatch", tcp), roster, rank, limit)
                self.combine = _nccl(PrefixStore("combine", tcp), roster, rank, limit)
                for group in (self.dispatch, self.combine):
                    self._connect(group, limit)
        except RuntimeError as error:
            if store is not None:
                store.close()
            self._abort_device_groups()
            raise where.error(f"{name} could not join: {_reason(error)}") from error

    @property
    def closed(self) -> bool:
        return self._closed

    def met(self) -> None:
        """All that ranks have to tell each other before the first step has been told."""
        self.store.close(met=True)

    def send(self, tensor: Tensor, peer: int, tag: int) -> Any:
        return self.control.send([tensor], peer, tag)

    def receive(self, tensor: Tensor, peer: int, tag: int) -> Any:
        return self.control.recv([tensor], peer, tag)

    def wait(
        self, work: Any, where: Where, timeout: timedelta | None = None, on_device: bool = False
    ) -> None:
        """Blocks until `work` is done. A late or lost peer closes the group and is named."""
        limit = self.deadline if timeout is None else timeout
        try:
            if on_device and self.device.type != "cpu":
                self._poll(work, limit)
            else:
                work.wait(limit)
        except RuntimeError as error:
            raise self.lost(where, error) from error

    def lost(self, where: Where, error: RuntimeError) -> ExchangeError:
        """Closes the epoch and says who was lost, where and why."""
        self.close()
        if self.verdict is not None:
            return where.error(self.verdict)
        name = where.group or self.roster.name(where.peer)
        return where.error(f"{name}: {_reason(error)}")

    def close(self, verdict: str | None = None) -> None:
        """Ends the epoch here: own waits and those of every peer fail at once. Never raises.

        From any thread. verdict: what later errors say, when the reason is known better than by a
        closed socket.
        """
        with self._closing:
            self.verdict = self.verdict or verdict
            if self._closed:
                return
            self._closed = True
            ends, self.on_close = self.on_close, []  # they refer to this object: a closed one goes
        self.store.close()
        for end in ends:
            end()
        # gloo has no abort that reaches a waiting thread, but a receive that times out closes
        # all connections of its group; nobody sends with this tag. A connection that is closed
        # already fails at once and closes no other: go on to the next.
        for peer in range(self.roster.size):
            if peer == self.rank:
                continue
            try:
                nothing = torch.empty(1, dtype=torch.uint8)
                self.control.recv([nothing], peer, CLOSE_TAG).wait(timedelta(milliseconds=1))
            except RuntimeError as error:
                if "Timed out" in str(error):
                    break
        self._abort_device_groups()

    def _abort_device_groups(self) -> None:
        for group in (self.dispatch, self.combine):
            if group is not self.control:
                group.abort()

    def _connect(self, group: Any, limit: timedelta) -> None:
        """NCCL connects a pair with the first bytes between them: here, beside the running epoch,
        instead of in the next one's first step."""
        out, into = (torch.zeros(self.roster.size, device=self.device) for _ in range(2))
        each = [1] * self.roster.size
        self._poll(group.alltoall_base(out, into, each, each, limit), limit)

    @staticmethod
    def _poll(work: Any, limit: timedelta) -> None:
        began = time.monotonic()
        while not work.is_completed():
            waited = time.monotonic() - began
            if waited > limit.total_seconds():
                raise RuntimeError("Timed out")
            time.sleep(POLL_S if waited > EAGER_S else 0)  # 0 still lets other threads run
        work.wait()


def _tcp_store(store: RendezvousStore, rank: int, host: str, limit: timedelta) -> TCPStore:
    """NCCL's own threads use their store for as long as they run: one without Python in it."""
    if rank == 0:
        tcp = TCPStore(host, 0, is_master=True, wait_for_workers=False, timeout=limit)
        store.set("tcp", f"{host} {tcp.port}")
        return tcp
    address, port = store.get("tcp").decode().split()
    return TCPStore(address, int(port), is_master=False, wait_for_workers=False, timeout=limit)


def _gloo(store: RendezvousStore, roster: Roster, rank: int, host: str, limit: timedelta) -> Any:
    gloo: Any = ProcessGroupGloo  # torch's stubs do not know its methods
    options = gloo._Options()
    # By address: the default resolves the host name, which in containers is often a loopback.
    options._devices = [gloo.create_device(hostname=host)]
    options._timeout = limit
    return gloo(store, rank, roster.size, options)


def _nccl(store: PrefixStore, roster: Roster, rank: int, limit: timedelta) -> Any:
    from torch.distributed import ProcessGroupNCCL  # absent in builds of torch for CPU

    options = ProcessGroupNCCL.Options()
    options._timeout = limit
    return ProcessGroupNCCL(store, rank, roster.size, options)


def _reason(error: RuntimeError) -> str:
    text = str(error)
    if "Timed out" in text or "timed out" in text or "imeout after" in text:
        return "no answer within the deadline"
    if "closed by peer" in text or "reset by peer" in text or "Broken pipe" in text:
        return "connection closed by peer"
    if "pair closure" in text:
        return "this rank has closed the epoch"
    return text.splitlines()[0][:300] if text else type(error).__name__
