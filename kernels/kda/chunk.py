"""Chunked form of the delta rule: matmuls instead of a loop over tokens.

The decay between rows s < r is the product of exp(log-decay) of the rows after s up to r. It is
split at the border between the two blocks that separate s from r, blocks of 1, 2, 4 ... 32 rows;
both factors are running products of numbers <= 1, doubled from level to level. Nothing can
overflow and nothing is ever divided or subtracted, so every gate is safe: bounded (K3) or not.
"""

from collections.abc import Sequence
from itertools import islice
from typing import NamedTuple

import torch
from torch import Tensor

from expertmesh.kernels.kda.types import CHUNK


class Sequel(NamedTuple):
    """Rows [begin, end) that continue one sequence.

    `offset`: distance of the first row from the previous multiple of 64 (0..63). `state_HDD`
    [H, Dk, Dv] is updated in place; `copies` get what it is after the last row, before a later
    sequel of the same state goes on.
    """

    begin: int
    end: int
    offset: int
    state_HDD: Tensor
    copies: Sequence[Tensor] = ()

    @property
    def chunks(self) -> int:
        return (self.offset + self.end - self.begin + CHUNK - 1) // CHUNK

    def moves(self, first_chunk: int) -> list[tuple[int, int, int]]:
        """(begin, end, place): rows to move so that each chunk starts at a multiple of 64.

        A chunk that starts off the grid keeps its rows at its beginning.
        """
        place, head = first_chunk * CHUNK, min(self.end, self.begin + CHUNK - self.offset)
        moves = [(self.begin, head, place)]
        return moves if head == self.end else [*moves, (head, self.end, place + CHUNK)]


def kda_chunk(
    q_THD: Tensor,
    k_THD: Tensor,
    v_THD: Tensor,
    gate_THD: Tensor,
    beta_TH: Tensor,
    state_HDD: Tensor,
    offset: int = 0,
) -> Tensor:
    """Delta rule over one sequence, all float32; q and k normalised, q scaled. -> [T, H, Dv]."""
    sequels = [Sequel(0, len(q_THD), offset, state_HDD)]
    return kda_chunks(q_THD, k_THD, v_THD, gate_THD, beta_TH, sequels)


def kda_chunks(
    q_THD: Tensor,
    k_THD: Tensor,
    v_THD: Tensor,
    gate_THD: Tensor,
    beta_TH: Tensor,
    sequels: Sequence[Sequel],
) -> Tensor:
    """Delta rule over several sequences; rows of none of them give zero. -> [T, H, Dv] float32.

    Every chunk is computed as 64 rows: missing ones are zeros, which change nothing.
    """
    rows, heads, dim = q_THD.shape
    out_THD = q_THD.new_zeros(rows, heads, dim)
    count = sum(sequel.chunks for sequel in sequels)
    moves, first = [], 0
    for sequel in sequels:
        moves += sequel.moves(first)
        first += sequel.chunks

    packed = q_THD.new_zeros(count * CHUNK, 4, heads, dim)
    beta = q_THD.new_zeros(count * CHUNK, heads)
    inputs = torch.stack((q_THD, k_THD, v_THD, gate_THD), dim=1)
    for begin, end, place in moves:
        packed[place : place + end - begin] = inputs[begin:end]
        beta[place : place + end - begin] = beta_TH[begin:end]
    packed = packed.view(count, CHUNK, 4, heads, dim).permute(2, 0, 3, 1, 4).contiguous()
    q, k, v, gate = packed.view(4, count * heads, CHUNK, dim)
    beta = beta.view(count, CHUNK, heads).transpose(1, 2).reshape(count * heads, CHUNK, 1)

    mix, attend, before, after = _within_chunks(q, k, gate)
    # U = (I + diag(beta) M)^-1 diag(beta) (V - (K before) S). The inverse comes from a solve with
    # the transposes on the right: LAPACK's column order then is ours and nothing is copied.
    inverse = torch.linalg.solve_triangular(
        mix.mul_(beta).transpose(1, 2),
        torch.diag_embed(beta.squeeze(-1)),
        upper=True,
        left=False,
        unitriangular=True,
    ).transpose(1, 2)
    u_new = torch.bmm(inverse, v).view(count, heads, CHUNK, dim).unbind(0)
    u_old = torch.bmm(inverse, k * before).view(count, heads, CHUNK, dim).unbind(0)
    q_old = (q * before).view(count, heads, CHUNK, dim).unbind(0)
    k_end = (k * after).view(count, heads, CHUNK, dim).transpose(2, 3).unbind(0)
    weights = attend.view(count, heads, CHUNK, CHUNK).unbind(0)
    keep = before[:, -1].reshape(count, heads, dim, 1).unbind(0)
    results = []
    numbers = iter(range(count))
    for sequel in sequels:
        state = sequel.state_HDD
        for n in islice(numbers, sequel.chunks):
            update = torch.baddbmm(u_new[n], u_old[n], state, alpha=-1.0)
            results.append(torch.bmm(q_old[n], state).baddbmm_(weights[n], update))
            state.mul_(keep[n]).baddbmm_(k_end[n], update)
        for copy in sequel.copies:
            copy.copy_(state)
    out = torch.stack(results).transpose(1, 2).reshape(count * CHUNK, heads, dim)
    for begin, end, place in moves:
        out_THD[begin:end] = out[place : place + end - begin]
    return out_THD


def _within_chunks(q: Tensor, k: Tensor, gate: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Products between the rows of N chunks: (mix, attend [N, 64, 64], before, after [N, 64, D]).

    mix[r, s] = k_r . (decay(s..r) k_s) for s < r; attend[r, s] = q_r . (decay(s..r) k_s) for
    s <= r; before[r] = decay from the chunk's start through r; after[s] = decay behind s.
    """
    count, _, dim = k.shape
    mix, attend = k.new_zeros(2, count, CHUNK, CHUNK)
    attend.diagonal(dim1=1, dim2=2).copy_(torch.linalg.vecdot(q, k))
    key_query = torch.stack((k, q), dim=2)
    before, after = gate.exp(), torch.ones_like(gate)
    size = 1
    while size < CHUNK:
        blocks = CHUNK // (2 * size)
        shape = (count, blocks, 2, size, dim)
        head_early, head_late = before.view(shape).unbind(2)
        tail_early = after.view(shape)[:, :, 0]
        late = key_query.view(count, blocks, 2, size, 2, dim)[:, :, 1] * head_late.unsqueeze(3)
        early = k.view(shape)[:, :, 0] * tail_early
        product = torch.bmm(
            late.view(count * blocks, 2 * size, dim),
            early.view(count * blocks, size, dim).transpose(1, 2),
        ).view(count, blocks, size, 2, size)
        for target, part in zip((mix, attend), product.unbind(3), strict=True):
            grid = target.view(count, blocks, 2 * size, blocks, 2 * size)
            corner = grid.diagonal(dim1=1, dim2=3)[:, size:, :size]  # [N, size, size, blocks]
            corner.copy_(part.permute(0, 2, 3, 1))
        # Double the blocks: the late half starts further back, the early half ends further on.
        tail_early.mul_(head_late[:, :, -1:])
        head_late.mul_(head_early[:, :, -1:])
        size *= 2
    return mix, attend, before, after
