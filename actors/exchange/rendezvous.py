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
from typing import Any

import msgspec
from torch._C._distributed_c10d import Store

FRAME = struct.Struct("<I")  # bytes that follow
MOST_BYTES = 1 << 20
# What a reply may take on top of what the request itself waits for.
GRACE_S = 5.0

_encode = msgspec.msgpack.encode
_decode = msgspec.msgpack.Decoder(tuple[str, list[str], bytes, float]).decode


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
    """Keys with their values, and whoever waits for one."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._values: dict[str, bytes] = {}

    def answer(self, verb: str, keys: list[str], value: bytes, limit_s: float) -> bytes | None:
        """None: not all keys came within the limit."""
        with self._changed:
            if verb == "set":
                self._values[keys[0]] = value
            elif verb == "offer":  # the first one wins
                value = self._values.setdefault(keys[0], value)
            elif not self._await(keys, limit_s):
                return None
            else:
                value = self._values[keys[0]]
            self._changed.notify_all()
            return value

    def _await(self, keys: list[str], limit_s: float) -> bool:
        end = time.monotonic() + limit_s
        while not all(key in self._values for key in keys):
            if not self._changed.wait(max(0.0, end - time.monotonic())) and time.monotonic() >= end:
                return False
        return True


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
    # A peer that goes, or one that speaks something else, ends its own connection only.
    with connection, suppress(OSError, EOFError, msgspec.DecodeError):
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        while True:
            found = board.answer(*_decode(_receive(connection)))
            _send(connection, _encode(found))


class RendezvousStore(Store):
    """One rank's view of it, as torch's process groups want it. RuntimeError for all failures."""

    def __init__(self, address: tuple[str, int], epoch: int, limit_s: float) -> None:
        """Ranks of other epochs at the same address do not see the keys of this one."""
        super().__init__()
        self._epoch, self._limit_s, self._lock = epoch, limit_s, threading.Lock()
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

    def has_extended_api(self) -> bool:
        return False

    def close(self) -> None:
        """Once the ranks have met nobody asks any more."""
        self._connection.close()

    def _ask(
        self, verb: str, keys: list[str], value: str | bytes = b"", limit_s: float | None = None
    ) -> bytes:
        limit_s = self._limit_s if limit_s is None else limit_s
        data = value.encode() if isinstance(value, str) else bytes(value)
        full = [f"{self._epoch}/{key}" for key in keys]
        try:
            with self._lock:
                self._connection.settimeout(limit_s + GRACE_S)
                _send(self._connection, _encode((verb, full, data, limit_s)))
                found: Any = msgspec.msgpack.decode(_receive(self._connection))
        except TimeoutError as error:
            raise RuntimeError(f"Timed out: the store does not answer for {keys}") from error
        except (OSError, EOFError) as error:
            raise RuntimeError("the store's connection was closed by peer") from error
        if found is None:
            raise RuntimeError(f"Timed out: nobody has set {keys}")
        return bytes(found)


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
