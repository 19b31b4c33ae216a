"""Router, gated activation and experts, the equations (k3-model 2.4)."""

import torch
from torch import Tensor

from expertmesh.kernels.latent_moe.types import ExpertWeightsOf, Glu


def route(
    logits_TE: Tensor, bias_E: Tensor, top_k: int, renormalize: bool, scaling: float
) -> tuple[Tensor, Tensor]:
    """s = sigmoid(logits); experts = top-k of s + bias; weights = their s, renormalised and scaled.

    Returns (ids int64 [T, K] by descending biased score, weights float32 [T, K]). Equal scores:
    any order.
    """
    scores = torch.sigmoid(logits_TE.float())
    ids = torch.argsort(scores + bias_E, dim=-1, descending=True, stable=True)[:, :top_k]
    weights = torch.gather(scores, 1, ids)
    if renormalize:
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    return ids, weights * scaling


def glu(gate_up_T2I: Tensor, spec: Glu) -> Tensor:
    """situ: b1 tanh(gate / b1) sigmoid(gate) * b2 tanh(up / b2); silu: silu(gate) * up.

    Float32 inside, result in the input's dtype.
    """
    gate, up = gate_up_T2I.float().chunk(2, dim=-1)
    if spec.kind == "silu":
        return (gate * torch.sigmoid(gate) * up).to(gate_up_T2I.dtype)
    left = spec.beta * torch.tanh(gate / spec.beta) * torch.sigmoid(gate)
    right = up if spec.linear_beta is None else spec.linear_beta * torch.tanh(up / spec.linear_beta)
    return (left * right).to(gate_up_T2I.dtype)


def experts_partial_sum(
    z_TD: Tensor,
    ids_TK: Tensor,
    weights_TK: Tensor,
    weights_of: ExpertWeightsOf,
    spec: Glu,
    *,
    sum_dtype: torch.dtype = torch.float32,
) -> Tensor:
    """y_t = sum_k w_tk * W2_e glu(W13_e z_t) over the local experts e = ids_tk >= 0.

    The terms are float32, their sum is in `sum_dtype`. Returns [T, D].
    """
    out = torch.zeros(z_TD.shape, dtype=sum_dtype)
    for t, ids in enumerate(ids_TK.tolist()):
        for k, expert in enumerate(ids):
            if expert < 0:
                continue
            w13, w2 = weights_of(expert)
            hidden = glu((w13 @ z_TD[t]).unsqueeze(0), spec)[0]
            out[t] += weights_TK[t, k] * (w2 @ hidden).float()
    return out
