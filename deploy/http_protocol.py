"""uvicorn's HTTP/1.1 connection with bounds that it lacks, and its refusals in the API's envelope.

httptools limits neither the size of a request's head nor the time it takes; a connection that never
finishes one would be held, and remembered, for ever. So is it with what follows a chunked body.
"""

import asyncio

import httptools
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from expertmesh.deploy.openai.errors import ApiError

HEAD_BYTES = 64 * 1024
# For a head to be whole; for the rest of a body that has been refused already.
HEAD_SECONDS = 60.0
_OFFERS = (b"upgrade", b"http2-settings")


class _HeadTooLarge(Exception):
    pass


class BoundedProtocol(HttpToolsProtocol):
    """One connection. A head above HEAD_BYTES is answered 431; what is no HTTP, 400.

    A refused body is read on to its end, or until HEAD_SECONDS have passed: clients look for an
    answer only when they have sent everything.
    """

    _head_bytes = 0  # of the lines that have ended
    _line_bytes = 0  # at least, of the line that has not
    _steps = 0  # of the parser, which remembers nothing of what it has stepped over
    _oversized = False
    _timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._start_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        self._unset_keepalive_if_required()
        before = self._steps
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as offer:
            self._pass_over(data[offer.args[0] :])
            return
        except httptools.HttpParserError:
            self.send_400_response("")
        if self.transport.is_closing():
            return
        # All of it belongs to one line of a head, or of what follows a body.
        if self._steps == before:
            self._line_bytes += len(data)
            if self._head_bytes + self._line_bytes > HEAD_BYTES:
                self._oversized = True
                self.send_400_response("")
        if self.cycle is None or self.cycle.response_complete:
            self._start_timer()

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._step()
        self._head_bytes = 0

    def on_url(self, url: bytes) -> None:
        self._count(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        self._count(len(name) + len(value) + 4)
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        if self.parser.should_upgrade():
            return  # data_received hears of it next
        self._step()
        self._stop_timer()
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._step()
        super().on_body(body)

    def on_chunk_header(self) -> None:
        self._step()

    def on_chunk_complete(self) -> None:
        self._step()

    def on_message_complete(self) -> None:
        if self.parser.should_upgrade():
            return
        super().on_message_complete()
        self._step()

    def _step(self) -> None:
        self._steps += 1
        self._line_bytes = 0

    def _count(self, size: int) -> None:
        self._step()
        self._head_bytes += size
        if self._head_bytes > HEAD_BYTES:
            self._oversized = True
            raise _HeadTooLarge  # the parser stops, and send_400_response is called

    def send_400_response(self, msg: str) -> None:
        """Refuses what came and closes. Inside an answer that is under way nothing can be said."""
        cycle = self.cycle
        if cycle is not None and cycle.response_started and not cycle.response_complete:
            self.transport.abort()
            return
        if self._oversized:
            error = ApiError(431, f"the request's head exceeds the limit of {HEAD_BYTES} bytes")
        else:
            error = ApiError(400, "this is not a valid HTTP request", code="invalid_http")
        response = error.response({"connection": "close"})
        head = [*self.server_state.default_headers, *response.raw_headers]
        lines = [b"%s: %s\r\n" % line for line in head]
        self.transport.write(
            b"".join([STATUS_LINE[error.status], *lines, b"\r\n", bytes(response.body)])
        )
        self.transport.close()

    def _pass_over(self, rest: bytes) -> None:
        """The request again without its offer to speak another protocol (h2c, websocket), as HTTP
        allows. The parser would take the body for that protocol."""
        method = self.parser.get_method()
        if method == b"CONNECT":
            self.send_400_response("")
            return
        lines = [b"%s %s HTTP/1.1" % (method, self.url)]
        for name, value in self.headers:
            if name == b"connection":
                tokens = [token.strip() for token in value.split(b",")]
                kept = [token for token in tokens if token.lower() not in _OFFERS]
                value = b", ".join(kept)
            if name not in _OFFERS and value:
                lines.append(b"%s: %s" % (name, value))
        self.parser = httptools.HttpRequestParser(self)
        self.data_received(b"\r\n".join([*lines, b"", b""]) + rest)

    def _start_timer(self) -> None:
        if self._timer is None:
            self._timer = self.loop.call_later(HEAD_SECONDS, self.transport.close)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
