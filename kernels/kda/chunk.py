"""Chunked form of the delta rule: matmuls instead of a loop over tokens.

The decay between two rows is exp(sum of the log-decays between them). It is factored at block
borders into two such sums, and each is summed directly (never as a difference of running sums):
all exponents are <= 0 and nothing cancels, so any gate is safe, bounded (K3) or not (softplus).
"""

from functools import cache

import torch
from torch import Tensor

from expertmesh.kernels.kda.types import CHUNK

LEAF = 8  # rows of the innermost blocks, whose pairs are taken one by one
_LEVELS = tuple(CHUNK >> (i + 1) for i in range((CHUNK // LEAF).bit_length() - 1))  # 32, 16, 8


@cache
def _span_sums() -> Tensor:
    """Constant 0/1 matrix [R, 64]: each row selects the tokens whose log-decays are summed.

    Groups of 64 rows: prefix (tokens <= r), suffix (tokens > r), then one group per block size of
    `_LEVELS`: for a row in the odd block of a pair of blocks the tokens from that block's start to
    r, for a row in the even block the tokens after r to that block's end. Last group: 8 leaves x
    28 pairs s < r, tokens in (s, r].
    """
    token = torch.arange(CHUNK)
    row = token.unsqueeze(1)
    groups = [token <= row, token > row]
    for size in _LEVELS:
        same = token // size == row // size
        odd = (row // size) % 2 == 1
        groups.append(same & torch.where(odd, token <= row, token > row))
    later, earlier = _leaf_pairs()
    for leaf in range(CHUNK // LEAF):
        r, s = (later + leaf * LEAF).unsqueeze(1), (earlier + leaf * LEAF).unsqueeze(1)
        groups.append((token > s) & (token <= r))
    return torch.cat(groups).float()


@cache
def _leaf_pairs() -> tuple[Tensor, Tensor]:
    """Row numbers (later, earlier) of the strictly lower pairs of a leaf."""
    lower = torch.tril_indices(LEAF, LEAF, -1)
    return lower[0], lower[1]


def kda_chunk(
    q_THD: Tensor,
    k_THD: Tensor,
    v_THD: Tensor,
    gate_THD: Tensor,
    beta_TH: Tensor,
    state_HDD: Tensor,
    offset: int = 0,
) -> Tensor:
    """Delta rule over one sequence; q and k normalised, q scaled, everything float32.

    `offset`: distance of the first row from the previous multiple of 64 (0..63). `state_HDD`
    [H, Dk, Dv] is updated in place. Returns [T, H, Dv].
    """
    rows, heads, dim = q_THD.shape
    chunks = (offset + rows + CHUNK - 1) // CHUNK
    first = min(CHUNK - offset, rows)
    # A chunk that starts off the grid keeps its rows at its beginning and zeros behind them.
    place = torch.arange(rows)
    if offset:
        place[first:] += CHUNK - first

    def blocks(x_THD: Tensor) -> Tensor:
        padded = x_THD.new_zeros(chunks * CHUNK, *x_THD.shape[1:])
        padded.index_copy_(0, place, x_THD)
        shape = (chunks, CHUNK, *x_THD.shape[1:])
        return padded.view(shape).transpose(1, 2).contiguous().flatten(0, 1)

    q, k, v, gate = (blocks(x) for x in (q_THD, k_THD, v_THD, gate_THD))  # [N*H, 64, D]
    beta = blocks(beta_TH.unsqueeze(-1))  # [N*H, 64, 1]
    count = chunks * heads

    sums = _span_sums()
    decay = torch.bmm(sums.expand(count, *sums.shape), gate).exp_()
    prefix, suffix = decay[:, :CHUNK], decay[:, CHUNK : 2 * CHUNK]
    mix, attend = _pair_products(q, k, decay[:, 2 * CHUNK :])
    mix.mul_(beta)
    # (I + M)^-1 diag(beta) for all chunks at once; the loop over chunks then is matmuls only.
    solved = torch.linalg.solve_triangular(
        mix, torch.diag_embed(beta.squeeze(-1)), upper=False, unitriangular=True
    )
    u_new = torch.bmm(solved, v).view(chunks, heads, CHUNK, dim)
    u_old = torch.bmm(solved, k * prefix).view(chunks, heads, CHUNK, dim)
    q_old = (q * prefix).view(chunks, heads, CHUNK, dim)
    k_end = (k * suffix).view(chunks, heads, CHUNK, dim).transpose(2, 3)
    attend = attend.view(chunks, heads, CHUNK, CHUNK)
    keep = prefix[:, -1].reshape(chunks, heads, dim, 1)
    out = q.new_empty(chunks, heads, CHUNK, dim)
    for n in range(chunks):
        update = torch.baddbmm(u_new[n], u_old[n], state_HDD, alpha=-1.0)
        torch.bmm(q_old[n], state_HDD, out=out[n])
        out[n].baddbmm_(attend[n], update)
        state_HDD.mul_(keep[n]).baddbmm_(k_end[n], update)
    return out.transpose(1, 2).reshape(chunks * CHUNK, heads, dim).index_select(0, place)


def _pair_products(q: Tensor, k: Tensor, decay: Tensor) -> tuple[Tensor, Tensor]:
    """(k_r . k_s, q_r . k_s) weighted by the decay between s and r, [N, 64, 64] each.

    The first is strictly lower, the second lower triangular; the rest is zero.
    """
    count, _, dim = k.shape
    mix = k.new_zeros(count, CHUNK, CHUNK)
    attend = torch.diag_embed(torch.linalg.vecdot(q, k))
    start = 0
    for size in _LEVELS:
        factor = decay[:, start : start + CHUNK]
        start += CHUNK
        shape = (count, CHUNK // (2 * size), 2, size, dim)
        k_even, k_odd = (k * factor).view(shape).unbind(2)
        q_odd = (q * factor).view(shape)[:, :, 1]
        right = k_even.transpose(2, 3)
        for target, left in ((mix, k_odd), (attend, q_odd)):
            grid = target.view(count, CHUNK // (2 * size), 2 * size, CHUNK)
            product = torch.matmul(left, right)
            for pair in range(CHUNK // (2 * size)):
                column = pair * 2 * size
                grid[:, pair, size:, column : column + size] = product[:, pair]
    later, earlier = _leaf_pairs()
    leaves = CHUNK // LEAF
    pairs = later.numel()
    base = torch.arange(leaves).unsqueeze(1) * LEAF
    rows, columns = (base + later).flatten(), (base + earlier).flatten()
    key = k.index_select(1, columns).mul_(decay[:, start : start + leaves * pairs])
    mix[:, rows, columns] = torch.linalg.vecdot(k.index_select(1, rows), key)
    attend[:, rows, columns] = torch.linalg.vecdot(q.index_select(1, rows), key)
    return mix, attend
