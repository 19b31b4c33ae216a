"""A gRPC client made of HTTP/2 frames, for what grpcio's own client never sends."""

import socket
import struct
import time
from collections.abc import Sequence
from types import TracebackType
from typing import Self

import h2.config
import h2.connection
import h2.events

Headers = Sequence[tuple[bytes, bytes]]


def framed(message: bytes, compressed: bool = False) -> bytes:
    return struct.pack(">BI", compressed, len(message)) + message


class RawChannel:
    """One connection. Reads only when asked to, so it can also play dead."""

    def __init__(self, address: str, seconds: float = 10.0) -> None:
        host, port = address.rsplit(":", 1)
        self.socket = socket.create_connection((host, int(port)), seconds)
        self._seconds = seconds
        config = h2.config.H2Configuration(
            header_encoding=None, validate_outbound_headers=False, normalize_outbound_headers=False
        )
        self.http = h2.connection.H2Connection(config)
        self.http.initiate_connection()
        self.flush()
        self.pings = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        self.socket.close()

    def flush(self) -> None:
        self.socket.sendall(self.http.data_to_send())

    def send(self, method: str, body: bytes | None, headers: Headers = (), end: bool = True) -> int:
        """Begins a call; body: framed messages, None: not one. The stream's number."""
        stream = self.http.get_next_available_stream_id()
        fixed = [
            (b":method", b"POST"), (b":scheme", b"http"), (b":path", method.encode()),
            (b":authority", b"test"), (b"te", b"trailers"), (b"content-type", b"application/grpc"),
        ]  # fmt: skip
        self.http.send_headers(stream, [*fixed, *headers])
        if body is not None:
            self.http.send_data(stream, body, end_stream=end)
        elif end:
            self.http.end_stream(stream)
        self.flush()
        return stream

    def events(self, seconds: float, answer: bool = True) -> list[h2.events.Event]:
        """What comes within the time, or until the next bytes. answer: acknowledge pings."""
        self.socket.settimeout(max(seconds, 0.001))
        try:
            data = self.socket.recv(65536)
        except TimeoutError:
            return []
        found = self.http.receive_data(data) if data else [h2.events.ConnectionTerminated()]
        self.pings += sum(isinstance(event, h2.events.PingReceived) for event in found)
        for event in found:
            if isinstance(event, h2.events.DataReceived) and event.flow_controlled_length:
                self.http.acknowledge_received_data(event.flow_controlled_length, event.stream_id)
        if answer:
            self.flush()
        return found

    def status(self, stream: int) -> tuple[int, str]:
        """(grpc-status, grpc-message) of a call, once it has ended."""
        headers: dict[bytes, bytes] = {}
        deadline = time.monotonic() + self._seconds
        while (left := deadline - time.monotonic()) > 0:
            for event in self.events(left):
                if isinstance(event, h2.events.ConnectionTerminated | h2.events.StreamReset):
                    raise AssertionError(f"{event} before a status")
                if isinstance(event, h2.events.ResponseReceived | h2.events.TrailersReceived):
                    if event.stream_id == stream:
                        headers |= dict(event.headers or ())
                elif isinstance(event, h2.events.StreamEnded) and event.stream_id == stream:
                    return int(headers[b"grpc-status"]), headers.get(b"grpc-message", b"").decode()
        raise AssertionError(f"no status within {self._seconds} s: {headers}")

    def call(
        self, method: str, body: bytes | None, headers: Headers = (), end: bool = True
    ) -> tuple[int, str]:
        return self.status(self.send(method, body, headers, end))
