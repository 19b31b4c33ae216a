"""Kimi Delta Attention, the equations (k3-model 2.2), token by token in float32."""

from collections.abc import Sequence

import torch
from torch import Tensor

from expertmesh.kernels.kda.types import KdaSave, KdaSpan

QK_EPS = 1e-6


def kda_gate(
    z_THD: Tensor, A_log_H: Tensor, dt_bias_HD: Tensor, lower_bound: float | None
) -> Tensor:
    """Log-decay per head and key channel; with x = z + dt_bias either
    lower_bound * sigmoid(exp(A) x), or without a bound -exp(A) * softplus(x).
    """
    x = z_THD.float() + dt_bias_HD
    rate = torch.exp(A_log_H).unsqueeze(-1)
    if lower_bound is None:
        return -rate * torch.logaddexp(x, torch.zeros_like(x))
    return lower_bound * torch.sigmoid(rate * x)


def l2_normalise(x: Tensor) -> Tensor:
    """x / sqrt(sum(x^2) + 1e-6) over the last axis."""
    return x / torch.sqrt(x.pow(2).sum(-1, keepdim=True) + QK_EPS)


def short_conv(qkv_TC: Tensor, conv_weight_CW: Tensor, window_VC: Tensor) -> Tensor:
    """y_t[c] = SiLU(sum_j w[c, j] x_{t-W+1+j}[c]).

    Rows before the first come from `window_VC` [W-1, C], which is updated in place to the last
    W-1 rows. Float32 inside, result in qkv's dtype.
    """
    width = conv_weight_CW.shape[1]
    out = torch.empty_like(qkv_TC)
    window = list(window_VC.clone())
    for t, row in enumerate(qkv_TC):
        window.append(row)
        y = torch.zeros(row.shape, dtype=torch.float32)
        for j in range(width):
            y = y + conv_weight_CW[:, j] * window[j].float()
        out[t] = (y * torch.sigmoid(y)).to(out.dtype)
        window.pop(0)
    for j, row in enumerate(window):
        window_VC[j] = row
    return out


def kda_recurrent(
    q_THD: Tensor,
    k_THD: Tensor,
    v_THD: Tensor,
    gate_THD: Tensor,
    beta_TH: Tensor,
    state_HDD: Tensor,
) -> Tensor:
    """The recurrence; q, k normalised and q scaled. `state_HDD` [H, Dk, Dv] is updated in place.

    S <- Diag(exp g) S;  S <- S + k (x) beta (v - S^T k);  o = S^T q. Returns [T, H, Dv].
    """
    tokens, heads, _ = q_THD.shape
    out = torch.empty_like(v_THD)
    for h in range(heads):
        s = state_HDD[h].clone()
        for t in range(tokens):
            s = torch.exp(gate_THD[t, h]).unsqueeze(1) * s
            delta = beta_TH[t, h] * (v_THD[t, h] - s.t() @ k_THD[t, h])
            s = s + torch.outer(k_THD[t, h], delta)
            out[t, h] = s.t() @ q_THD[t, h]
        state_HDD[h] = s
    return out


def kda_prefill(
    qkv_TC: Tensor,
    z_THD: Tensor,
    beta_TH: Tensor,
    conv_weight_CW: Tensor,
    A_log_H: Tensor,
    dt_bias_HD: Tensor,
    lower_bound: float | None,
    conv_state: Tensor,
    state: Tensor,
    spans: Sequence[tuple[int, int, int, int]],
    saves: Sequence[KdaSave] = (),
) -> Tensor:
    """Convolution, normalisation, gate and recurrence of every span, in their order.

    `conv_state` [S, W-1, C] (C = q|k|v of all heads, oldest row first) and `state` [S, H, Dk, Dv]
    float32 are updated in place. beta_TH are logits, z_THD is without dt_bias. Returns float32
    [T, H, D], zero outside the spans.
    """
    tokens, heads, dim = z_THD.shape
    out = torch.zeros(tokens, heads, dim, dtype=torch.float32)
    for number, span in enumerate(spans):
        slot, begin, end, _ = KdaSpan(*span)
        mixed = short_conv(qkv_TC[begin:end], conv_weight_CW, conv_state[slot]).float()
        q, k, v = (x.reshape(end - begin, heads, dim) for x in mixed.chunk(3, dim=-1))
        out[begin:end] = kda_recurrent(
            l2_normalise(q) * dim**-0.5,
            l2_normalise(k),
            v,
            kda_gate(z_THD[begin:end], A_log_H, dt_bias_HD, lower_bound),
            torch.sigmoid(beta_TH[begin:end].float()),
            state[slot],
        )
        for save in saves:
            if save.after == number:
                save.conv.copy_(conv_state[slot])
                save.state.copy_(state[slot])
    return out


def kda_decode(
    qkv_BC: Tensor,
    z_BHD: Tensor,
    beta_BH: Tensor,
    conv_weight_CW: Tensor,
    A_log_H: Tensor,
    dt_bias_HD: Tensor,
    lower_bound: float | None,
    conv_state: Tensor,
    state: Tensor,
    slots_B: Tensor,
) -> Tensor:
    """One token per row: a prefill of length one for every slot. Slot -1: a zero row, no state."""
    slots = slots_B.tolist()
    spans = [KdaSpan(slot, row, row + 1, 0) for row, slot in enumerate(slots) if slot >= 0]
    return kda_prefill(
        qkv_BC,
        z_BHD,
        beta_BH,
        conv_weight_CW,
        A_log_H,
        dt_bias_HD,
        lower_bound,
        conv_state,
        state,
        spans,
    )
