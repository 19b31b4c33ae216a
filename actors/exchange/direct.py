"""The layout for CPUs: a plain TCP connection per pair of attention and expert rank.

gloo moves each message in three (two of them to agree on a buffer that both sides know already)
through a helper thread on either side; here a message is one send and one receive, in the threads
that compute. Measured with 8 KB on one machine: 25 us a round trip in place of 400.
"""

import select
import socket
import struct
import threading
import time
from collections import deque
from contextlib import suppress
from datetime import timedelta

import torch
from torch import Tensor

from expertmesh.actors.exchange.formats import Formats
from expertmesh.actors.exchange.layouts import Flight, FrameSets
from expertmesh.actors.exchange.opening import LEAVE, WORDS, Opening
from expertmesh.actors.exchange.process_group import Groups, Where
from expertmesh.actors.exchange.wire import (
    HEADER_BYTES,
    MAGIC,
    Frame,
    Round,
    host_memory,
    read_headers,
)

HELLO = struct.Struct("<qqq")  # magic, epoch, rank
# How often a rank that waits to be called asks whether all are still there.
CHECK_S = 0.2


class Line:
    """One connection. Reads wait up to a limit; queued writes never wait for the peer.

    Whoever reads also sends what is queued: two ranks that write to each other at the same time,
    more than the kernel's buffers hold, would otherwise wait for each other for ever. Any thread
    may queue: whoever closes an exchange says farewell while a step may be under way.
    """

    def __init__(self, connection: socket.socket) -> None:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.setblocking(False)
        self._socket = connection
        self._queued: deque[memoryview] = deque()
        self._pushing = threading.Lock()
        self._readable, self._both = select.poll(), select.poll()
        self._readable.register(connection, select.POLLIN)
        self._both.register(connection, select.POLLIN | select.POLLOUT)

    def queue(self, data: memoryview) -> None:
        """Sends now what the kernel takes, the rest during later reads. The data must stay."""
        if data.nbytes:
            self._queued.append(data)
            self._push()

    def _push(self) -> None:
        with self._pushing:
            while self._queued:
                data = self._queued[0]
                try:
                    sent = self._socket.send(data)
                except BlockingIOError:
                    return
                if sent < data.nbytes:
                    self._queued[0] = data[sent:]
                else:
                    self._queued.popleft()

    def read(self, into: memoryview, limit_s: float) -> None:
        """Fills `into`. Raises TimeoutError when nothing comes for `limit_s`, ConnectionError when
        the connection is gone."""
        while into.nbytes:
            self._wait(self._both if self._queued else self._readable, limit_s)
            try:
                got = self._socket.recv_into(into)
            except BlockingIOError:
                continue
            if got == 0:
                raise ConnectionResetError("closed by peer")
            into = into[got:]

    def flush(self, limit_s: float) -> None:
        """Waits until the kernel has taken everything. For a peer that is sure to be reading."""
        end = time.monotonic() + limit_s
        writable = select.poll()
        writable.register(self._socket, select.POLLOUT)
        while self._queued:
            self._wait(writable, max(0.0, end - time.monotonic()))

    def _wait(self, poller: select.poll, limit_s: float) -> None:
        ready = poller.poll(limit_s * 1000)
        if not ready:
            raise TimeoutError("Timed out")
        if self._queued and ready[0][1] & select.POLLOUT:
            self._push()

    def fileno(self) -> int:
        return self._socket.fileno()

    def close(self) -> None:
        """Also wakes a thread that waits in `read`."""
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)


class _Lines:
    """The connections of one rank, by peer."""

    def __init__(self, groups: Groups, lines: dict[int, Line]) -> None:
        self.groups, self.lines = groups, lines
        self.limit_s = groups.deadline.total_seconds()
        for line in lines.values():
            groups.on_close.append(line.close)

    def queue(self, peer: int, data: memoryview, where: Where) -> None:
        try:
            self.lines[peer].queue(data)
        except OSError as error:
            raise self._lost(where, error) from error

    def read(self, peer: int, into: memoryview, where: Where) -> None:
        try:
            self.lines[peer].read(into, self.limit_s)
        except OSError as error:
            raise self._lost(where, error) from error

    def park(self) -> list[int]:
        """The peers of which something has come, or whose connection is gone. Waits without a
        limit, until then or until the epoch is closed here."""
        waiting = select.poll()
        peers = {line.fileno(): peer for peer, line in self.lines.items()}
        for descriptor in peers:
            waiting.register(descriptor, select.POLLIN)
        return sorted(peers[descriptor] for descriptor, _ in waiting.poll())

    def flush(self, peer: int, where: Where) -> None:
        try:
            self.lines[peer].flush(self.limit_s)
        except OSError as error:
            raise self._lost(where, error) from error

    def _lost(self, where: Where, error: OSError) -> Exception:
        if self.groups.closed:
            reason = "pair closure"
        else:
            reason = "Timed out" if isinstance(error, TimeoutError) else "closed by peer"
        return self.groups.lost(where, RuntimeError(reason))


class DirectAttention:
    def __init__(self, groups: Groups, formats: Formats, host: str) -> None:
        roster = groups.roster
        self._peers = range(roster.attention, roster.size)
        self._lines = _Lines(groups, _call(groups, host))
        self._out = FrameSets(formats.dispatch, formats.max_rows, groups.device)
        self._in = FrameSets(formats.combine, formats.max_rows, groups.device)
        self._flying: deque[Flight] = deque()

    def tell(self, announcement: Tensor) -> None:
        """Sends an opening to every expert rank."""
        data = host_memory(announcement.clone())
        for peer in self._peers:
            self._lines.queue(peer, data, Where(peer, -1, "open", -1))

    def outgoing(self, at: Round, capacity: int) -> list[Frame]:
        return self._out.get(len(self._peers), at.micro, at.chunk)

    def post(self, at: Round, capacity: int, rows: list[int]) -> Flight:
        for peer, frame, count in zip(self._peers, self.outgoing(at, capacity), rows, strict=True):
            self._lines.queue(peer, frame.span(count), Where(peer, at.layer, "dispatch", at.step))
        replies = self._in.get(len(self._peers), at.micro, at.chunk)
        flight = Flight(at, replies, rows, [])
        self._flying.append(flight)
        return flight

    def land(self, flight: Flight) -> list[Frame]:
        # Replies come in the order of the rounds, whatever order they are asked for in.
        while not flight.landed:
            first = self._flying.popleft()
            layer, step = first.at.layer, first.at.step
            for peer, frame, count in zip(self._peers, first.replies, first.receives, strict=True):
                self._lines.read(peer, frame.span(count), Where(peer, layer, "combine", step))
            first.landed = True
        return flight.replies


class DirectExpert:
    def __init__(self, groups: Groups, formats: Formats, host: str) -> None:
        self._peers = range(groups.roster.attention)
        self._lines = _Lines(groups, _answer(groups, host))
        self._in = FrameSets(formats.dispatch, formats.max_rows, groups.device)
        self._out = FrameSets(formats.combine, formats.max_rows, groups.device)

    def collect(self, step: int) -> list[Opening]:
        """The opening of every attention rank, or a single farewell. Parks until one comes."""
        openings: dict[int, Opening] = {}
        message = torch.zeros(WORDS, dtype=torch.int64)
        ready = self._lines.park()
        for peer in [*ready, *(peer for peer in self._peers if peer not in ready)]:
            self._lines.read(peer, host_memory(message), Where(peer, -1, "open", step))
            openings[peer] = opening = Opening.read(message)
            if opening.kind == LEAVE:
                return [opening]
        return [openings[peer] for peer in self._peers]

    def receive(self, at: Round, capacity: int) -> list[Frame]:
        frames = self._in.get(len(self._peers))
        for peer, frame in zip(self._peers, frames, strict=True):
            where = Where(peer, at.layer, "dispatch", at.step)
            self._lines.read(peer, frame.memory[:HEADER_BYTES], where)
            [header] = read_headers([frame])
            # Else the caller raises, and its size means nothing.
            if frame.mismatch(header, at) is None:
                self._lines.read(peer, frame.span(header.rows)[HEADER_BYTES:], where)
        return frames

    def outgoing(self, at: Round, capacity: int) -> list[Frame]:
        return self._out.get(len(self._peers))

    def send(self, at: Round, capacity: int, rows: list[int]) -> None:
        for peer, frame, count in zip(self._peers, self.outgoing(at, capacity), rows, strict=True):
            where = Where(peer, at.layer, "combine", at.step)
            self._lines.queue(peer, frame.span(count), where)
            self._lines.flush(peer, where)


def _answer(groups: Groups, host: str) -> dict[int, Line]:
    """An expert rank listens, says where in the store, and takes one call per attention rank."""
    roster, limit = groups.roster, groups.join_deadline.total_seconds()
    where = Where(groups.rank, -1, "join", -1)
    lines: dict[int, Line] = {}
    try:
        with socket.create_server((host, 0), backlog=roster.attention) as server:
            groups.store.set(f"direct/{groups.rank}", f"{host} {server.getsockname()[1]}")
            end = time.monotonic() + limit
            while len(lines) < roster.attention:
                if time.monotonic() > end:
                    raise TimeoutError("Timed out")
                server.settimeout(CHECK_S)
                try:
                    connection, _ = server.accept()
                except TimeoutError:
                    groups.store.check_all_here()
                    continue
                peer = _greeted(connection, roster.epoch, end)
                if peer is not None:
                    lines[peer] = Line(connection)
    except (OSError, RuntimeError) as error:
        raise groups.lost(where, RuntimeError(f"not called: {error}")) from error
    return lines


def _greeted(connection: socket.socket, epoch: int, end: float) -> int | None:
    """Which attention rank of this epoch calls; None for somebody else, who is hung up on."""
    connection.settimeout(max(0.01, end - time.monotonic()))
    hello = connection.recv(HELLO.size, socket.MSG_WAITALL)
    if len(hello) == HELLO.size:
        magic, theirs, rank = HELLO.unpack(hello)
        if (magic, theirs) == (MAGIC, epoch):
            return int(rank)
    connection.close()
    return None


def _call(groups: Groups, host: str) -> dict[int, Line]:
    roster, limit = groups.roster, groups.join_deadline.total_seconds()
    lines: dict[int, Line] = {}
    for peer in range(roster.attention, roster.size):
        where = Where(peer, -1, "join", -1)
        try:
            groups.store.wait([f"direct/{peer}"], timedelta(seconds=limit))
            address, port = groups.store.get(f"direct/{peer}").decode().split()
            connection = socket.create_connection((address, int(port)), limit, (host, 0))
            connection.sendall(HELLO.pack(MAGIC, roster.epoch, groups.rank))
        except (OSError, RuntimeError) as error:
            raise groups.lost(where, RuntimeError(f"not reached: {error}")) from error
        lines[peer] = Line(connection)
    return lines
