"""Kimi Delta Attention and latent attention in float64, from the equations (k3-model.md 2)."""

from typing import Any

import torch
from torch import Tensor

from tests.bench.gpu.claims import Claim, floating

Args = tuple[Any, ...]
PAGE = 64

# Relative L2 error of products whose operands are rounded to bfloat16 (8 bits, so 2^-9 at most and
# a third of it on average, twice or three times in a row), and in float32 with tensor cores (tf32).
BFLOAT16, FLOAT32 = 4e-3, 1e-3


def _operands(*tensors: Tensor) -> float:
    return BFLOAT16 if any(t.dtype == torch.bfloat16 for t in tensors) else FLOAT32


def kda_decode(args: Args, result: Tensor, after: Args) -> list[Claim]:
    """Every row is one step of its slot; a row with slot -1 gives zeros and touches nothing."""
    qkv, z, beta, weight, a_log, bias, bound, conv_state, state, slots = args
    exact_conv, exact_state = conv_state.clone(), state.double()
    exact = torch.zeros(z.shape, dtype=torch.float64, device=z.device)
    used = (slots >= 0).nonzero().squeeze(1)
    slot = slots[used]
    window = torch.cat((conv_state[slot], qkv[used].unsqueeze(1)), dim=1)
    exact_conv[slot] = window[:, 1:]
    q, k, v = _inputs(_silu((window.double() * weight.double().t()).sum(1), qkv.dtype), z.shape[1:])
    gate = _gate(z[used], a_log, bias, bound)
    flat = exact_state[slot].flatten(0, 1)
    out, flat = _step(
        flat, *(x.flatten(0, 1) for x in (q, k, v, gate, torch.sigmoid(beta[used].double())))
    )
    exact[used] = out.unflatten(0, (used.shape[0], -1))
    exact_state[slot] = flat.unflatten(0, (used.shape[0], -1))
    return _kda_claims(result, exact, after, exact_state, exact_conv, 1e-4)


def kda_prefill(args: Args, result: Tensor, after: Args) -> list[Claim]:
    """Token by token, so nothing of the chunked form is shared. Zero outside the spans."""
    qkv, z, beta, weight, a_log, bias, bound, conv_state, state, spans = args
    exact_conv, exact_state = conv_state.clone(), state.double()
    exact = torch.zeros(z.shape, dtype=torch.float64, device=z.device)
    for slot, begin, end, _ in spans:
        if end == begin:
            continue
        padded = torch.cat((conv_state[slot], qkv[begin:end]))
        exact_conv[slot] = padded[end - begin :]
        taps = [
            padded[tap : tap + end - begin].double() * weight[:, tap].double()
            for tap in range(weight.shape[1])
        ]
        q, k, v = _inputs(_silu(sum(taps[1:], taps[0]), qkv.dtype), z.shape[1:])
        gate = _gate(z[begin:end], a_log, bias, bound)
        strength = torch.sigmoid(beta[begin:end].double())
        running = exact_state[slot]
        for t in range(end - begin):
            out, running = _step(running, q[t], k[t], v[t], gate[t], strength[t])
            exact[begin + t] = out
        exact_state[slot] = running
    return _kda_claims(result, exact, after, exact_state, exact_conv, 2 * _operands(qkv))


def _kda_claims(
    out: Tensor, exact: Tensor, after: Args, state: Tensor, conv: Tensor, l2: float
) -> list[Claim]:
    return [
        floating("out", out, exact, l2=l2),
        floating("state", after[8], state, l2=l2),
        Claim("window", after[7], conv.double()),
    ]


def _silu(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Rounded as the stored projections are: that is what the published code normalises."""
    return (x * torch.sigmoid(x)).to(dtype).double()


def _inputs(mixed: Tensor, shape: torch.Size) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = (x.unflatten(1, shape) for x in mixed.chunk(3, dim=1))
    q, k = (x / torch.sqrt(x.square().sum(-1, keepdim=True) + 1e-6) for x in (q, k))
    return q * shape[1] ** -0.5, k, v


def _gate(z: Tensor, a_log: Tensor, bias: Tensor, bound: float | None) -> Tensor:
    x, rate = z.double() + bias.double(), a_log.double().exp().unsqueeze(-1)
    if bound is None:
        return -rate * torch.logaddexp(x, torch.zeros_like(x))
    return bound * torch.sigmoid(rate * x)


def _step(
    state: Tensor, q: Tensor, k: Tensor, v: Tensor, gate: Tensor, beta: Tensor
) -> tuple[Tensor, Tensor]:
    """state [N, Dk, Dv], the others [N, D], beta [N] -> (out [N, Dv], new state)."""
    state = gate.exp().unsqueeze(-1) * state
    predicted = torch.bmm(k.unsqueeze(1), state).squeeze(1)
    state = torch.baddbmm(
        state, k.unsqueeze(2), (beta.unsqueeze(-1) * (v - predicted)).unsqueeze(1)
    )
    return torch.bmm(q.unsqueeze(1), state).squeeze(1), state


def mla_decode(args: Args, result: Tensor, _: Args) -> list[Claim]:
    """A row of length 0 gives zeros."""
    q_latent, q_rope, cache, table, lengths, scale, *_ = args
    exact = torch.zeros(q_latent.shape, dtype=torch.float64, device=q_latent.device)
    rank = q_latent.shape[2]
    for row, length in enumerate(lengths.tolist()):
        if length:
            latent, rope = _context(cache, table[row], length).split_with_sizes(
                [rank, cache.shape[1] - rank], dim=1
            )
            score = q_latent[row].double() @ latent.t() + q_rope[row].double() @ rope.t()
            exact[row] = torch.softmax(score * scale, -1) @ latent
    return [floating("out", result, exact, l2=_operands(q_latent, cache))]


def mla_prefill(args: Args, result: Tensor, _: Args) -> list[Claim]:
    q_nope, q_rope, cache, w_k, w_v, spans, scale = args
    tokens, heads, _ = q_nope.shape
    exact = torch.zeros(tokens, heads, w_v.shape[1], dtype=torch.float64, device=cache.device)
    for begin, end, position, pages, _ in spans:
        latent, rope = _context(cache, pages, position + end - begin).split_with_sizes(
            [w_k.shape[2], cache.shape[1] - w_k.shape[2]], dim=1
        )
        place = torch.arange(latent.shape[0], device=cache.device)
        ahead = place > (position + torch.arange(end - begin, device=cache.device)).unsqueeze(1)
        for head in range(heads):
            key, value = latent @ w_k[head].double().t(), latent @ w_v[head].double().t()
            score = q_nope[begin:end, head].double() @ key.t()
            score += q_rope[begin:end, head].double() @ rope.t()
            score = (score * scale).masked_fill_(ahead, -torch.inf)
            exact[begin:end, head] = torch.softmax(score, -1) @ value
    return [floating("out", result, exact, l2=2 * _operands(q_nope, cache))]


def _context(cache: Tensor, pages: Tensor, length: int) -> Tensor:
    """The first `length` cache rows of a sequence, float64."""
    places = torch.arange(length, device=cache.device)
    return cache[pages.to(cache.device)[places // PAGE] * PAGE + places % PAGE].double()
