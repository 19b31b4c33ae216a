"""Where the ranks of an epoch meet: a key-value store on rank 0, over TCP.

In place of torch's TCPStore, which asks DNS for its peer's name at every connect, for its log: one
lost packet stalls a join for five seconds. Numeric addresses only, here.
"""

import socket
import struct
import threading
import time
import weakref
from contextlib import suppress
from datetime import timedelta

import msgspec
from torch._C._distributed_c10d import Store

FRAME = struct.Struct("<I")  # bytes that follow
MOST_BYTES = 1 << 20
# What a reply may take on top of what the request itself waits for.
GRACE_S = 5.0


class _Ask(msgspec.Struct, array_like=True, frozen=True):
    """verb: get | set | offer | check | met. who: the rank that asks, for errors."""

    epoch: int
    who: str
    verb: str
    keys: list[str] = []
    value: bytes = b""
    limit_s: float = 0.0


class _Answer(msgspec.Struct, array_like=True, frozen=True):
    value: bytes = b""
    failure: str | None = None


_encode = msgspec.msgpack.encode
_read_ask = msgspec.msgpack.Decoder(_Ask).decode
_read_answer = msgspec.msgpack.Decoder(_Answer).decode


class Rendezvous:
    """The serving end. Ends when it is closed or dropped; a rank has gone by then."""

    def __init__(self, host: str) -> None:
        """Listens on a port the system picks: no probe, hence no race."""
        self._listener = socket.create_server((host, 0), backlog=128)
        self.address: tuple[str, int] = (host, self._listener.getsockname()[1])
        args = (self._listener, _Board())
        threading.Thread(target=_accept, args=args, name="rendezvous", daemon=True).start()
        self.close = weakref.finalize(self, _close, self._listener)


class _Board:
    """Keys with their values, whoever waits for one, and who has gone too early. By epoch."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._values: dict[tuple[int, str], bytes] = {}
        self._gone: dict[int, str] = {}

    def answer(self, ask: _Ask) -> _Answer:
        with self._changed:
            if ask.verb == "get":
                return self._await(ask)
            if ask.verb == "check":
                return self._check(ask.epoch)
            key = ask.epoch, ask.keys[0]
            if ask.verb == "set":
                self._values[key] = ask.value
            found = self._values.setdefault(key, ask.value)  # of several offers the first one wins
            self._changed.notify_all()
            return _Answer(found)

    def gone(self, epoch: int, who: str) -> None:
        """Whoever waits in that epoch, or asks later, need not wait for its deadline."""
        with self._changed:
            self._gone.setdefault(epoch, who)
            self._changed.notify_all()

    def _check(self, epoch: int) -> _Answer:
        who = self._gone.get(epoch)
        return _Answer(failure=None if who is None else f"{who} has gone before all had met")

    def _await(self, ask: _Ask) -> _Answer:
        end = time.monotonic() + ask.limit_s
        while missing := [key for key in ask.keys if (ask.epoch, key) not in self._values]:
            if ask.epoch in self._gone:
                return self._check(ask.epoch)
            left = end - time.monotonic()
            if left <= 0:
                return _Answer(failure=f"Timed out: nobody has set {missing}")
            self._changed.wait(left)
        return _Answer(self._values[ask.epoch, ask.keys[0]])


def _close(listener: socket.socket) -> None:
    with suppress(OSError):
        listener.shutdown(socket.SHUT_RDWR)  # wakes the thread in accept
    listener.close()


def _accept(listener: socket.socket, board: _Board) -> None:
    with suppress(OSError):  # the listener was closed
        while True:
            connection, _ = listener.accept()
            threading.Thread(
                target=_serve, args=(connection, board), name="rendezvous-peer", daemon=True
            ).start()


def _serve(connection: socket.socket, board: _Board) -> None:
    asked: _Ask | None = None
    # A peer that goes, or one that speaks something else, ends its own connection only.
    with connection, suppress(OSError, EOFError, msgspec.DecodeError):
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        while True:
            asked = _read_ask(_receive(connection))
            if asked.verb == "met":
                return
            _send(connection, _encode(board.answer(asked)))
    if asked is not None:
        board.gone(asked.epoch, asked.who)


class RendezvousStore(Store):
    """One rank's view of it, as torch's process groups want it. RuntimeError for all failures."""

    def __init__(self, address: tuple[str, int], epoch: int, who: str, limit_s: float) -> None:
        """Ranks of other epochs at the same address do not see the keys of this one."""
        super().__init__()
        self._epoch, self._who, self._limit_s = epoch, who, limit_s
        self._lock = threading.Lock()
        try:
            self._connection = socket.create_connection(address, limit_s)
        except OSError as error:
            raise RuntimeError(f"{address[0]}:{address[1]} does not answer: {error}") from error
        self._connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def set(self, key: str, value: str | bytes) -> None:
        self._ask("set", [key], value)

    def get(self, key: str) -> bytes:
        return self._ask("get", [key])

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        self._ask("get", keys, limit_s=None if timeout is None else timeout.total_seconds())

    def offer(self, key: str, value: str) -> str:
        """Sets the key unless it has a value; returns the one it has now."""
        return self._ask("offer", [key], value).decode()

    def check_all_here(self) -> None:
        """Raises when a rank has gone that others may still wait for."""
        self._ask("check", [])

    def has_extended_api(self) -> bool:
        return False

    def close(self, met: bool = False) -> None:
        """met: this rank has met all others and asks no more. Else the others learn at once that
        it gives up."""
        with suppress(OSError):
            if met:
                _send(self._connection, _encode(_Ask(self._epoch, self._who, "met")))
            self._connection.shutdown(socket.SHUT_RDWR)
        self._connection.close()

    def _ask(
        self, verb: str, keys: list[str], value: str | bytes = b"", limit_s: float | None = None
    ) -> bytes:
        limit_s = self._limit_s if limit_s is None else limit_s
        data = value.encode() if isinstance(value, str) else bytes(value)
        ask = _Ask(self._epoch, self._who, verb, keys, data, limit_s)
        try:
            with self._lock:
                self._connection.settimeout(limit_s + GRACE_S)
                _send(self._connection, _encode(ask))
                answer = _read_answer(_receive(self._connection))
        except TimeoutError as error:
            raise RuntimeError(f"Timed out: the store does not answer for {keys}") from error
        except (OSError, EOFError) as error:
            raise RuntimeError("the store's connection was closed by peer") from error
        if answer.failure is not None:
            raise RuntimeError(answer.failure)
        return answer.value


def _send(connection: socket.socket, message: bytes) -> None:
    connection.sendall(FRAME.pack(len(message)) + message)


def _receive(connection: socket.socket) -> bytes:
    (size,) = FRAME.unpack(_exactly(connection, FRAME.size))
    if size > MOST_BYTES:
        raise EOFError(f"a message of {size} bytes")
    return _exactly(connection, size)


def _exactly(connection: socket.socket, size: int) -> bytes:
    parts = b""
    while len(parts) < size:
        part = connection.recv(size - len(parts))
        if not part:
            raise EOFError("closed by peer")
        parts += part
    return parts
