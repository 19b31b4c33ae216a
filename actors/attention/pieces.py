"""Messages in pieces that Ray sends along with a call.

What is longer than 100 KB Ray puts into its object store, which then holds request data, must not
be full, and needs another trip for the reader to fetch it. Arguments of a call stay out of it up to
10 MB together, results one by one.
"""

from collections.abc import Iterator

PIECE_BYTES = 64 << 10
# Of the pieces of one call together.
CALL_BYTES = 8 << 20
# A piece begins with the one byte with which no msgpack message does.
_MORE, _LAST = b"\xc1\x01", b"\xc1\x00"


def split(message: bytes) -> list[bytes]:
    """For the arguments of one call; joined they are the message."""
    return [message[at : at + PIECE_BYTES] for at in range(0, len(message), PIECE_BYTES)]


def results(message: bytes) -> Iterator[bytes]:
    """For a stream of results, whose reader has a Joiner. The message: msgpack, not empty."""
    if len(message) <= PIECE_BYTES:
        yield message
        return
    *first, last = split(message)
    for piece in first:
        yield _MORE + piece
    yield _LAST + last


class Joiner:
    """Puts the messages of one stream together again."""

    def __init__(self) -> None:
        self._pieces: list[bytes] = []

    def feed(self, piece: bytes) -> bytes | None:
        """The message that the piece completes, if it does."""
        mark = piece[:2]
        if mark not in (_MORE, _LAST):
            return piece
        self._pieces.append(piece[2:])
        if mark == _MORE:
            return None
        pieces, self._pieces = self._pieces, []
        return b"".join(pieces)
