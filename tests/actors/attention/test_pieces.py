"""Messages that go out in pieces come back whole, and short ones go as they are."""

import msgspec
import pytest

from expertmesh.actors.attention.pieces import PIECE_BYTES, Joiner, results, split


@pytest.mark.parametrize("size", [1, PIECE_BYTES - 1, PIECE_BYTES, PIECE_BYTES + 1, 300_001])
def test_whole_again(size: int) -> None:
    messages = [bytes([0xC1]) * size, b"\x90", bytes(range(256)) * (size // 256) + b"\x91"]
    joiner, got = Joiner(), []
    for message in (msgspec.msgpack.encode([one]) for one in messages):
        assert b"".join(split(message)) == message
        pieces = list(results(message))
        assert all(len(piece) <= PIECE_BYTES + 2 for piece in pieces)
        fed = [joiner.feed(piece) for piece in pieces]
        assert fed[:-1] == [None] * (len(pieces) - 1)
        got.append(msgspec.msgpack.decode(fed[-1] or b"", type=list[bytes])[0])
    assert got == messages


def test_short_messages_are_not_touched() -> None:
    message = msgspec.msgpack.encode([1, 2, 3])
    assert list(results(message)) == [message]
