"""Moving frames through a process group: exact messages per pair, or padded all-to-all.

Each layout has an attention end and an expert end. The attention end posts a round (its receives,
then its sends) and later lands the replies; the expert end receives a round and sends the replies.
All layouts (direct.py, counted.py and whole.py are the others) carry the same values per row, so
results are equal bit for bit.
"""

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from expertmesh.actors.exchange.base import ExchangeError
from expertmesh.actors.exchange.formats import Formats
from expertmesh.actors.exchange.process_group import DATA_TAG, Groups, Where
from expertmesh.actors.exchange.wire import Frame, Round, Section, message_bytes, new_buffer


@dataclass(slots=True)
class Flight:
    """A posted round: what is on its way, and the frames its replies land in."""

    at: Round
    replies: list[Frame]
    receives: list[Any]
    sends: list[Any]
    landed: bool = False


class AttentionEnd(Protocol):
    def outgoing(self, at: Round, capacity: int) -> list[Frame]:
        """One frame per expert actor, to be filled for this round."""
        ...

    def post(self, at: Round, capacity: int, rows: list[int]) -> Flight:
        """Sends the filled frames, `rows[e]` rows to expert actor e. Does not wait."""
        ...

    def land(self, flight: Flight) -> list[Frame]:
        """Waits for the replies. Raises ExchangeError."""
        ...


class ExpertEnd(Protocol):
    def receive(self, at: Round, capacity: int) -> list[Frame]:
        """Waits for one frame from each attention rank. Raises ExchangeError."""
        ...

    def outgoing(self, at: Round, capacity: int) -> list[Frame]:
        """One reply frame per attention rank, to be filled for this round."""
        ...

    def send(self, at: Round, capacity: int, rows: list[int]) -> None: ...


class FrameSets:
    """Frames kept for reuse, by purpose: one set per micro-batch, chunk and peer."""

    def __init__(self, sections: tuple[Section, ...], max_rows: int, device: torch.device) -> None:
        self._made: dict[tuple[int, ...], list[Frame]] = {}
        self._sections, self._max_rows, self._device = sections, max_rows, device

    def get(self, count: int, *key: int) -> list[Frame]:
        frames = self._made.get(key)
        if frames is None:
            frames = [Frame(self._sections, self._max_rows, self._device) for _ in range(count)]
            self._made[key] = frames
        return frames


class ExactAttention:
    """Receives are posted before the sends, so that a reply never waits for its receiver."""

    def __init__(self, groups: Groups, formats: Formats) -> None:
        self._groups = groups
        roster = groups.roster
        self._peers = range(roster.attention, roster.size)
        self._out = FrameSets(formats.dispatch, formats.max_rows, groups.device)
        self._in = FrameSets(formats.combine, formats.max_rows, groups.device)

    def outgoing(self, at: Round, capacity: int) -> list[Frame]:
        return self._out.get(len(self._peers), at.micro, at.chunk)

    def post(self, at: Round, capacity: int, rows: list[int]) -> Flight:
        groups, out = self._groups, self.outgoing(at, capacity)
        replies = self._in.get(len(self._peers), at.micro, at.chunk)
        receives, sends, peer = [], [], -1
        try:
            for peer, reply in zip(self._peers, replies, strict=True):
                receives.append(groups.receive(reply.buffer, peer, DATA_TAG))
            for peer, frame, count in zip(self._peers, out, rows, strict=True):
                sends.append(groups.send(frame.prefix(count), peer, DATA_TAG))
        except RuntimeError as error:
            raise groups.lost(Where(peer, at.layer, "dispatch", at.step), error) from error
        return Flight(at, replies, receives, sends)

    def land(self, flight: Flight) -> list[Frame]:
        at = flight.at
        for peer, work in zip(self._peers, flight.receives, strict=True):
            self._groups.wait(work, Where(peer, at.layer, "combine", at.step))
        for peer, work in zip(self._peers, flight.sends, strict=True):
            self._groups.wait(work, Where(peer, at.layer, "dispatch", at.step))
        return flight.replies


class ExactExpert:
    """Receives for the coming round are posted before the current one is computed."""

    def __init__(self, groups: Groups, formats: Formats) -> None:
        self._groups = groups
        self._peers = range(groups.roster.attention)
        self._in = FrameSets(formats.dispatch, formats.max_rows, groups.device)
        self._out = FrameSets(formats.combine, formats.max_rows, groups.device)
        self._turn = 0
        self._posted = self._post()
        self._sends: dict[int, list[Any]] = {}

    def _post(self) -> list[Any]:
        frames = self._in.get(len(self._peers), self._turn)
        pairs = zip(self._peers, frames, strict=True)
        return [self._groups.receive(frame.buffer, peer, DATA_TAG) for peer, frame in pairs]

    def receive(self, at: Round, capacity: int) -> list[Frame]:
        for peer, work in zip(self._peers, self._posted, strict=True):
            self._groups.wait(work, Where(peer, at.layer, "dispatch", at.step))
        arrived = self._in.get(len(self._peers), self._turn)
        self._turn = 1 - self._turn
        peer = 0
        try:
            self._posted = self._post()
        except RuntimeError as error:
            raise self._groups.lost(Where(peer, at.layer, "dispatch", at.step), error) from error
        return arrived

    def outgoing(self, at: Round, capacity: int) -> list[Frame]:
        for peer, work in zip(self._peers, self._sends.pop(at.micro, ()), strict=False):
            self._groups.wait(work, Where(peer, at.layer, "combine", at.step))
        return self._out.get(len(self._peers), at.micro)

    def send(self, at: Round, capacity: int, rows: list[int]) -> None:
        frames, sends, peer = self._out.get(len(self._peers), at.micro), [], -1
        try:
            for peer, frame, count in zip(self._peers, frames, rows, strict=True):
                sends.append(self._groups.send(frame.prefix(count), peer, DATA_TAG))
        except RuntimeError as error:
            raise self._groups.lost(Where(peer, at.layer, "combine", at.step), error) from error
        self._sends[at.micro] = sends


class Padded:
    """One buffer per direction, cut into a slot per peer; slots hold `capacity` rows.

    The capacity is agreed when a step opens, so all shapes are known before any row arrives:
    what NCCL needs. Splits are zero between ranks of the same kind.
    """

    def __init__(self, groups: Groups, formats: Formats) -> None:
        self._groups, self._formats = groups, formats
        roster = groups.roster
        mine = groups.rank < roster.attention
        self._count = roster.experts if mine else roster.attention
        self._first = roster.attention if mine else 0  # rank of the first peer
        self._none = [0] * roster.size
        self._buffers: dict[tuple[int, ...], tuple[Tensor, list[Frame]]] = {}
        self._empty = torch.empty(0, dtype=torch.uint8, device=groups.device)

    def _cut(
        self, sections: tuple[Section, ...], capacity: int, *key: int
    ) -> tuple[Tensor, list[Frame]]:
        kept = self._buffers.get((capacity, *key))
        if kept is None:
            size = message_bytes(sections, capacity)
            device = self._groups.device
            whole = new_buffer(size * self._count, device)
            slots = whole.view(self._count, size)
            frames = [Frame(sections, capacity, device, slot) for slot in slots]
            kept = self._buffers[capacity, *key] = whole, frames
        return kept

    def _spread(self, sizes: list[int]) -> list[int]:
        """By rank: `sizes` for the peers, nothing for ranks of the own kind."""
        spread = list(self._none)
        spread[self._first : self._first + self._count] = sizes
        return spread

    def _even(self, whole: Tensor) -> list[int]:
        return self._spread([whole.numel() // self._count] * self._count)

    def _give(self, group: Any, whole: Tensor, splits: list[int] | None = None) -> Any:
        """splits: bytes by rank; by default the peers get equal parts."""
        limit = self._groups.deadline
        splits = splits or self._even(whole)
        return group.alltoall_base(self._empty, whole, self._none, splits, limit)

    def _take(self, group: Any, whole: Tensor, splits: list[int] | None = None) -> Any:
        limit = self._groups.deadline
        splits = splits or self._even(whole)
        return group.alltoall_base(whole, self._empty, splits, self._none, limit)

    def _refused(self, peer: int, at: Round, phase: str, wrong: str) -> ExchangeError:
        """Ends the epoch; peer: counted among the peers."""
        self._groups.close()
        return Where(self._first + peer, at.layer, phase, at.step).error(wrong)

    def _wait(self, work: Any, at: Round, phase: str) -> None:
        first, last = self._first, self._first + self._count - 1
        name = self._groups.roster.name
        group = "" if first == last else f"one of {name(first)} to {name(last)}"
        where = Where(first, at.layer, phase, at.step, group)
        self._groups.wait(work, where, on_device=True)


class PaddedAttention(Padded):
    def outgoing(self, at: Round, capacity: int) -> list[Frame]:
        return self._cut(self._formats.dispatch, capacity, 0, at.micro, at.chunk)[1]

    def post(self, at: Round, capacity: int, rows: list[int]) -> Flight:
        out, _ = self._cut(self._formats.dispatch, capacity, 0, at.micro, at.chunk)
        back, replies = self._cut(self._formats.combine, capacity, 1, at.micro, at.chunk)
        sent = self._give(self._groups.dispatch, out)
        return Flight(at, replies, [self._take(self._groups.combine, back)], [sent])

    def land(self, flight: Flight) -> list[Frame]:
        self._wait(flight.sends[0], flight.at, "dispatch")
        self._wait(flight.receives[0], flight.at, "combine")
        return flight.replies


class PaddedExpert(Padded):
    def __init__(self, groups: Groups, formats: Formats) -> None:
        super().__init__(groups, formats)
        self._sent: dict[int, tuple[Round, Any]] = {}

    def receive(self, at: Round, capacity: int) -> list[Frame]:
        whole, frames = self._cut(self._formats.dispatch, capacity, 0)
        self._wait(self._take(self._groups.dispatch, whole), at, "dispatch")
        return frames

    def outgoing(self, at: Round, capacity: int) -> list[Frame]:
        if at.micro in self._sent:
            self._wait(self._sent[at.micro][1], self._sent.pop(at.micro)[0], "combine")
        return self._cut(self._formats.combine, capacity, 1, at.micro)[1]

    def send(self, at: Round, capacity: int, rows: list[int]) -> None:
        whole, _ = self._cut(self._formats.combine, capacity, 1, at.micro)
        self._sent[at.micro] = at, self._give(self._groups.combine, whole)
