"""Kimi Delta Attention for training: the token recurrence and the differentiable chunked form."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

CHUNK = 64
# Rows that share one pivot: 16 rows of a log-decay above -5 span exp(80), which fits float32.
SUB = 16


def kda_recurrent(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
    """The equation, one token at a time; q, k, v, g are [B, H, T, D], beta [B, H, T].

    q and k arrive normalised (q already scaled); returns o [B, H, T, D].
    """
    B, H, T, D = q.shape
    state = q.new_zeros(B, H, D, D)
    out = []
    for t in range(T):
        state = state * g[:, :, t].exp().unsqueeze(-1)
        read = torch.einsum("bhkv,bhk->bhv", state, k[:, :, t])
        delta = beta[:, :, t, None] * (v[:, :, t] - read)
        state = state + k[:, :, t].unsqueeze(-1) * delta.unsqueeze(-2)
        out.append(torch.einsum("bhkv,bhk->bhv", state, q[:, :, t]))
    return torch.stack(out, dim=2)


def within_chunks(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Everything that does not depend on the incoming state; inputs [R, N, 64, D], R = B*H.

    exp(G_r - G_s) is factored around the middle row of r's 16-row block: columns of earlier
    blocks then have exponents <= 0, and inside the block both exponents stay within +-40.
    """
    D = q.shape[-1]
    G = g.cumsum(dim=2)
    kb = k * beta
    a_rows, m_rows = [], []
    for lo in range(0, CHUNK, SUB):
        hi = lo + SUB
        pivot = G[:, :, lo + SUB // 2 : lo + SUB // 2 + 1]
        up = (G[:, :, lo:hi] - pivot).exp()
        rows = torch.cat((q[:, :, lo:hi] * up, kb[:, :, lo:hi] * up), dim=2)
        cols = k[:, :, :hi] * (pivot - G[:, :, :hi]).exp()
        both = F.pad(rows @ cols.transpose(-1, -2), (0, CHUNK - hi))
        a_rows.append(both[:, :, :SUB])
        m_rows.append(both[:, :, SUB:])
    A = torch.cat(a_rows, dim=2).tril()
    M = torch.cat(m_rows, dim=2).tril(-1)

    decay_in = G.exp()
    rhs = torch.cat((v * beta, kb * decay_in), dim=-1)
    solved = torch.linalg.solve_triangular(M, rhs, upper=False, unitriangular=True)
    U0, W = solved.split(D, dim=-1)
    q_in = q * decay_in
    k_out = (k * (G[:, :, -1:] - G).exp()).transpose(-1, -2)
    decay_out = decay_in[:, :, -1].unsqueeze(-1)
    return A, U0, W, q_in, k_out, decay_out


def kda_chunked(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
    """Same result as `kda_recurrent`, in chunks of 64 tokens with matrix products."""
    B, H, T, D = q.shape
    pad = -T % CHUNK
    if pad:
        q, k, v, g = (F.pad(x, (0, 0, 0, pad)) for x in (q, k, v, g))
        beta = F.pad(beta, (0, pad))
    N = (T + pad) // CHUNK
    q, k, v, g = (x.reshape(B * H, N, CHUNK, D) for x in (q, k, v, g))
    beta = beta.reshape(B * H, N, CHUNK, 1)
    A, U0, W, q_in, k_out, decay_out = within_chunks(q, k, v, g, beta)

    state = q.new_zeros(B * H, D, D)
    outs = []
    for n in range(N):
        U = U0[:, n] - W[:, n] @ state
        outs.append(q_in[:, n] @ state + A[:, n] @ U)
        state = state * decay_out[:, n] + k_out[:, n] @ U
    return torch.stack(outs, dim=1).reshape(B, H, N * CHUNK, D)[:, :, :T]
