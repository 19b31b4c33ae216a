"""The operators as one writes them in torch for a GPU, where the torch twin is made for CPUs.

Each function takes the operator's arguments and returns the call to time: what a program would do
once (decoding weights, reading lengths) is done before.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.bench.gpu.choice_formulas import expert_matrices
from tests.bench.gpu.operators import implementation, tensors

Call = Callable[[], Any]
PAGE = 64


def plain_torch(operator: str) -> tuple[str, Callable[..., Call]]:
    """(what it is, arguments -> the call)."""
    own = _PLAIN.get(operator)
    if own is not None:
        return "plain torch", own
    return "torch twin", partial(_on_device, implementation(operator, "torch"))


def _on_device(twin: Callable[..., Any], *args: Any) -> Call:
    """The twin makes its own tensors on the default device: here, where its arguments are."""
    device = tensors(args)[0].device

    def call() -> Any:
        with device:
            return twin(*args)

    return call


def _kda_decode(*args: Any) -> Call:
    qkv, z, beta, weight, a_log, bias, bound, conv_state, state, slots = args
    heads, dim = z.shape[1:]

    def call() -> Tensor:
        window = torch.cat((conv_state[slots], qkv.unsqueeze(1)), dim=1)
        conv_state[slots] = window[:, 1:]
        mixed = F.silu((window.float() * weight.t()).sum(1)).view(-1, 3, heads, dim)
        q, k, v = mixed.unbind(1)
        q, k = F.normalize(q, dim=-1) * dim**-0.5, F.normalize(k, dim=-1)
        x, rate = z.float() + bias, a_log.exp().unsqueeze(-1)
        gate = -rate * F.softplus(x) if bound is None else bound * torch.sigmoid(rate * x)
        memory = state[slots] * gate.exp().unsqueeze(-1)
        delta = torch.sigmoid(beta.float()).unsqueeze(-1) * (
            v - (k.unsqueeze(-2) @ memory).squeeze(-2)
        )
        memory = memory + k.unsqueeze(-1) * delta.unsqueeze(-2)
        state[slots] = memory
        return (q.unsqueeze(-2) @ memory).squeeze(-2)

    return call


def _mla_decode(*args: Any) -> Call:
    """Gathers the longest context for every row and masks: torch has no paged attention."""
    q_latent, q_rope, cache, table, lengths, scale, *_ = args
    longest, rank = int(lengths.max()), q_latent.shape[2]
    places = torch.arange(longest, device=cache.device)
    hidden = torch.where(places < lengths.unsqueeze(1), 0.0, -torch.inf).to(q_latent.dtype)

    def call() -> Tensor:
        context = cache[table[:, places // PAGE] * PAGE + places % PAGE].unsqueeze(1)
        query = torch.cat((q_latent, q_rope), dim=-1).unsqueeze(2).transpose(1, 2)
        return F.scaled_dot_product_attention(
            query, context, context[..., :rank], attn_mask=hidden[:, None, None], scale=scale
        )

    return call


def _experts(*args: Any) -> Call:
    """Decoded weights, one pair of products per expert that has rows."""
    z, ids, weights, weights_of, spec = args
    used = ids[ids >= 0].unique().tolist()
    held = {}
    for expert in used:
        w1, w3, w2 = expert_matrices(weights_of.table(), expert)
        held[expert] = torch.cat((w1, w3)).to(z.dtype), w2.to(z.dtype)
    rows = {expert: (ids == expert).nonzero(as_tuple=True) for expert in used}

    def call() -> Tensor:
        out = torch.zeros(z.shape, dtype=torch.float32, device=z.device)
        for expert, (w13, w2) in held.items():
            token, place = rows[expert]
            term = _activated(z[token] @ w13.t(), spec) @ w2.t()
            out.index_add_(0, token, term.float() * weights[token, place].unsqueeze(1))
        return out

    return call


def _glu(gate_up: Tensor, spec: Any) -> Call:
    return lambda: _activated(gate_up, spec)


def _activated(gate_up: Tensor, spec: Any) -> Tensor:
    gate, up = gate_up.float().chunk(2, dim=-1)
    if spec.kind == "silu":
        return (F.silu(gate) * up).to(gate_up.dtype)
    left = spec.beta * torch.tanh(gate / spec.beta) * torch.sigmoid(gate)
    soft = spec.linear_beta
    return (left * (up if soft is None else soft * torch.tanh(up / soft))).to(gate_up.dtype)


def _mxfp4_decode(packed: Tensor, scale: Tensor, dtype: torch.dtype = torch.float32) -> Call:
    """Both nibbles of a byte looked up at once."""
    device = packed.device
    codes = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0], device=device)
    signed, byte = torch.cat((codes, -codes)), torch.arange(256, device=device)
    pairs = torch.stack((signed[byte & 15], signed[byte >> 4]), dim=1)

    def call() -> Tensor:
        blocks = pairs[packed.int()].view(*scale.shape, 32)
        return (blocks * torch.exp2(scale.float() - 127.0).unsqueeze(-1)).flatten(-2).to(dtype)

    return call


def _sample(*args: Any) -> Call:
    """Sorted once per row, filters as masks, the inverse of the cumulative sum."""
    logits, temperature, top_k, top_p, min_p, uniform = args
    size = logits.shape[1]
    some = torch.where((top_k > 0) & (top_k < size), top_k, size).unsqueeze(1)
    warm = temperature.clamp(min=1e-5).unsqueeze(1)

    def call() -> Tensor:
        weight, order = torch.softmax(logits.float() / warm, -1).sort(-1, descending=True)
        place = torch.arange(size, device=logits.device)
        reached = weight.double().cumsum(-1)
        keep = (place < some) & (reached - weight < top_p.unsqueeze(1))
        keep &= weight >= min_p.unsqueeze(1) * weight[:, :1]
        kept = torch.where(keep, weight, 0.0).double().cumsum(-1)
        target = uniform.double().unsqueeze(1) * kept[:, -1:]
        drawn = torch.searchsorted(kept, target, right=True).clamp(max=size - 1)
        return order.gather(1, drawn).squeeze(1)

    return call


_PLAIN: dict[str, Callable[..., Call]] = {
    "kda_decode": _kda_decode,
    "mla_decode": _mla_decode,
    "experts_partial_sum": _experts,
    "glu": _glu,
    "mxfp4_decode": _mxfp4_decode,
    "sample": _sample,
}
