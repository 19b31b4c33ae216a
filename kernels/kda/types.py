"""Plain records of the KDA operator."""

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

CHUNK = 64  # tokens per chunk; chunks are cut at absolute multiples of it


class KdaSpan(NamedTuple):
    """Rows [row_begin, row_end) of a packed batch that continue the sequence in `slot`.

    `position` is the absolute position of the first row.
    """

    slot: int
    row_begin: int
    row_end: int
    position: int


class KdaSave(NamedTuple):
    """Copies of a slot as it is when span number `after` has been computed and no later one of the
    same slot has begun: conv [W-1, C], state [H, Dk, Dv]."""

    after: int
    conv: Tensor
    state: Tensor


def in_rounds(
    spans: Sequence[KdaSpan], saves: Sequence[KdaSave]
) -> list[tuple[list[KdaSpan], list[tuple[int, KdaSave]]]]:
    """Spans in rounds of distinct slots, those of one slot in order, each round with the (slot,
    save) that follow it: for kernels that compute all spans at once."""
    rounds: list[tuple[list[KdaSpan], list[tuple[int, KdaSave]]]] = []
    turns: dict[int, int] = {}
    for number, span in enumerate(spans):
        turn = turns.get(span.slot, 0)
        turns[span.slot] = turn + 1
        if turn == len(rounds):
            rounds.append(([], []))
        rounds[turn][0].append(span)
        rounds[turn][1].extend((span.slot, save) for save in saves if save.after == number)
    return rounds
