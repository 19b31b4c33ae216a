"""Messages as long as their rows, by all-to-all: the row counts travel ahead of the rows.

For steps of many rows on GPUs, where a collective must know all sizes and an actor gets only the
rows that concern it. The expert's host reads the counts before it can receive.
"""

from typing import Any

import torch
from torch import Tensor

from expertmesh.actors.exchange.formats import Formats
from expertmesh.actors.exchange.layouts import Flight, FrameSets, Padded
from expertmesh.actors.exchange.process_group import Groups
from expertmesh.actors.exchange.wire import (
    HEADER_BYTES,
    Frame,
    Round,
    Section,
    message_bytes,
    new_buffer,
    read_headers,
)


class _Counted(Padded):
    def __init__(self, groups: Groups, formats: Formats) -> None:
        super().__init__(groups, formats)
        mine = groups.rank < groups.roster.attention
        sections = formats.dispatch if mine else formats.combine
        self._out = FrameSets(sections, formats.max_rows, groups.device)

    def _exactly(
        self, sections: tuple[Section, ...], rows: list[int]
    ) -> tuple[Tensor, list[int], list[Frame]]:
        """Room for messages of so many rows, back to back: whole, its splits, and cut in frames."""
        sizes = [message_bytes(sections, count) for count in rows]
        device = self._groups.device
        whole = new_buffer(sum(sizes), device)
        parts = torch.split(whole, sizes)  # type: ignore[no-untyped-call]
        frames = [Frame(sections, self._formats.max_rows, device, part) for part in parts]
        return whole, self._spread(sizes), frames

    def _packed(self, frames: list[Frame], rows: list[int]) -> tuple[Tensor, list[int]]:
        parts = [frame.prefix(count) for frame, count in zip(frames, rows, strict=True)]
        return torch.cat(parts), self._spread([part.numel() for part in parts])


class CountedAttention(_Counted):
    def outgoing(self, at: Round, capacity: int) -> list[Frame]:
        return self._out.get(self._count, at.micro, at.chunk)

    def post(self, at: Round, capacity: int, rows: list[int]) -> Flight:
        out = self.outgoing(at, capacity)
        headers = torch.cat([frame.buffer[:HEADER_BYTES] for frame in out])
        packed, splits = self._packed(out, rows)
        whole, back_splits, replies = self._exactly(self._formats.combine, rows)
        groups = self._groups
        # With the works, as whoever sends must keep what is sent.
        sends = [
            (self._give(groups.dispatch, headers), headers),
            (self._give(groups.dispatch, packed, splits), packed),
        ]
        received = self._take(groups.combine, whole, back_splits)
        return Flight(at, replies, [received], sends)

    def land(self, flight: Flight) -> list[Frame]:
        for work, _ in flight.sends:
            self._wait(work, flight.at, "dispatch")
        self._wait(flight.receives[0], flight.at, "combine")
        return flight.replies


class CountedExpert(_Counted):
    def __init__(self, groups: Groups, formats: Formats) -> None:
        super().__init__(groups, formats)
        device = groups.device
        self._headers = new_buffer(HEADER_BYTES * self._count, device)
        each = self._headers.view(self._count, HEADER_BYTES)
        self._heads = [Frame((), formats.max_rows, device, part) for part in each]
        self._sent: dict[int, tuple[Round, Any, Tensor]] = {}

    def receive(self, at: Round, capacity: int) -> list[Frame]:
        self._wait(self._take(self._groups.dispatch, self._headers), at, "dispatch")
        rows = []
        for peer, header in enumerate(read_headers(self._heads)):
            wrong = self._heads[peer].mismatch(header, at)
            if wrong is not None:
                raise self._refused(peer, at, "dispatch", wrong)
            rows.append(header.rows)
        whole, splits, frames = self._exactly(self._formats.dispatch, rows)
        self._wait(self._take(self._groups.dispatch, whole, splits), at, "dispatch")
        return frames

    def outgoing(self, at: Round, capacity: int) -> list[Frame]:
        if at.micro in self._sent:
            before, work, _ = self._sent.pop(at.micro)
            self._wait(work, before, "combine")
        return self._out.get(self._count, at.micro)

    def send(self, at: Round, capacity: int, rows: list[int]) -> None:
        packed, splits = self._packed(self._out.get(self._count, at.micro), rows)
        self._sent[at.micro] = at, self._give(self._groups.combine, packed, splits), packed
