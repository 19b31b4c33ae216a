"""A differentiable Kimi K3 text model in float32, written for reading and for training on CPU.

Shapes: B rows, T tokens, C hidden width, H heads, D head width, E experts, K experts per token,
L latent width, N = B*T. Parameter names follow the checkpoint except that the experts of a layer
are stacked as w1, w3 [E, width, L] and w2 [E, L, width].
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from expertmesh.deploy.training.kda import kda_chunked


@dataclass(frozen=True)
class NanoConfig:
    """Sizes of the model; the defaults are the bundled model."""

    vocab: int = 2048
    hidden: int = 192
    layers: int = 8
    mla_layers: tuple[int, ...] = (3, 7)  # 0-based
    block: int = 4
    heads: int = 3
    head_dim: int = 64
    lower_bound: float = -5.0
    q_lora: int = 96
    kv_lora: int = 96
    nope: int = 64
    rope: int = 32
    v_dim: int = 64
    dense_width: int = 384
    experts: int = 16
    top_k: int = 4
    latent: int = 96
    expert_width: int = 64
    shared_width: int = 64
    eps: float = 1e-5
    lora_eps: float = 1e-6
    beta_gate: float = 4.0
    beta_up: float = 25.0


def rms(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return F.rms_norm(x, (x.shape[-1],), weight, eps)


def situ(gate: Tensor, up: Tensor, cfg: NanoConfig) -> Tensor:
    """Soft-capped GLU: beta1*tanh(gate/beta1)*sigmoid(gate) * beta2*tanh(up/beta2)."""
    gate = cfg.beta_gate * torch.tanh(gate / cfg.beta_gate) * torch.sigmoid(gate)
    return gate * (cfg.beta_up * torch.tanh(up / cfg.beta_up))


def matrix(rows: int, cols: int, gain: float = 1.0) -> nn.Parameter:
    return nn.Parameter(torch.randn(rows, cols) * gain * cols**-0.5)


def ones(n: int) -> nn.Parameter:
    return nn.Parameter(torch.ones(n))


class Mix(nn.Module):
    """Attention residual: softmax over depth sources, scored by a learned constant query."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.norm = ones(hidden)
        self.proj = nn.Parameter(torch.zeros(1, hidden))

    def forward(self, bank: list[Tensor], p: Tensor) -> Tensor:
        """bank and p are [B, T, C]; returns the weighted sum of the raw sources."""
        if not bank:
            return p
        return mix(self.norm * self.proj[0], [*bank, p])


def mix(query: Tensor, sources: list[Tensor]) -> Tensor:
    """sources [B, T, C] each; scores are query . v / rms(v), in fp32."""
    scores = [(v @ query) * torch.rsqrt(v.square().mean(-1) + 1e-5) for v in sources]
    alpha = torch.stack(scores, dim=-1).softmax(dim=-1)
    out = sources[0] * alpha[..., :1]
    for j, v in enumerate(sources[1:], start=1):
        out = out + v * alpha[..., j : j + 1]
    return out


class KDA(nn.Module):
    def __init__(self, cfg: NanoConfig) -> None:
        super().__init__()
        self.cfg = cfg
        C, P = cfg.hidden, cfg.heads * cfg.head_dim
        self.q_proj, self.k_proj, self.v_proj = matrix(P, C), matrix(P, C), matrix(P, C)
        self.g_proj, self.b_proj = matrix(P, C), matrix(cfg.heads, C)
        self.f_a_proj, self.f_b_proj = matrix(cfg.head_dim, C), matrix(P, cfg.head_dim, 0.3)
        conv = torch.randn(3, P, 1, 4) * 0.2
        conv[..., 3] += 0.7  # start close to "the current token"
        self.q_conv1d, self.k_conv1d, self.v_conv1d = (nn.Parameter(c.clone()) for c in conv)
        self.A_log = nn.Parameter(torch.zeros(cfg.heads))
        # -5*sigmoid(b): memory spans from about two tokens to several thousand, even in log space
        spread = torch.linspace(-8.5, -1.5, cfg.head_dim)
        self.dt_bias = nn.Parameter(spread.repeat(cfg.heads))
        self.o_norm = ones(cfg.head_dim)
        self.o_proj = matrix(C, P, 0.3)

    def forward(self, x: Tensor) -> Tensor:
        cfg = self.cfg
        B, T, _ = x.shape
        H, D = cfg.heads, cfg.head_dim
        P = H * D
        fused = torch.cat(
            (self.q_proj, self.k_proj, self.v_proj, self.g_proj, self.f_a_proj, self.b_proj)
        )
        qkv, gate, f_a, b = F.linear(x, fused).split((3 * P, P, D, H), dim=-1)
        taps = torch.cat((self.q_conv1d, self.k_conv1d, self.v_conv1d))[:, 0]
        qkv = causal_conv(qkv, taps)
        q, k, v = qkv.view(B, T, 3, H, D).permute(2, 0, 3, 1, 4).unbind(0)
        q = q * (torch.rsqrt(q.square().sum(-1, keepdim=True) + 1e-6) * D**-0.5)
        k = k * torch.rsqrt(k.square().sum(-1, keepdim=True) + 1e-6)
        z = (F.linear(f_a, self.f_b_proj) + self.dt_bias).view(B, T, H, D)
        g = cfg.lower_bound * torch.sigmoid(self.A_log.exp()[:, None] * z)
        out = kda_chunked(q, k, v, g.transpose(1, 2), torch.sigmoid(b).transpose(1, 2))
        out = rms(out.transpose(1, 2), self.o_norm, cfg.eps).reshape(B, T, P)
        return F.linear(out * torch.sigmoid(gate), self.o_proj)


@torch.no_grad()
def seed_recall(kda: KDA, head: int) -> None:
    """Set one head up to look for "what came after these tokens last time".

    Query and key share a projection; the query mixes tokens t-2..t and the key the same mix one
    token earlier, so that a query meets the key written where its context occurred before. From a
    plain start this took longer to be found than a short run lasts.
    """
    cfg = kda.cfg
    D = cfg.head_dim
    rows = slice(head * D, (head + 1) * D)
    kda.q_proj[rows] = kda.k_proj[rows] = torch.randn(D, cfg.hidden) * cfg.hidden**-0.5
    taps = torch.rand(D, 1, 3) * torch.tensor([0.5, 0.8, 1.0])
    kda.q_conv1d[rows] = F.pad(taps, (1, 0))
    kda.k_conv1d[rows] = F.pad(taps, (0, 1))
    value = torch.randn(D, cfg.hidden) * cfg.hidden**-0.5
    kda.v_proj[rows], kda.o_proj[:, rows] = value, value.T * 0.3
    kda.v_conv1d[rows] = torch.tensor([0.0, 0.0, 0.0, 1.0])
    kda.g_proj[rows], kda.b_proj[head], kda.f_b_proj[rows] = 0.0, 0.0, 0.0
    kda.dt_bias[rows] = torch.linspace(-9.5, -6.0, D)
    kda.A_log[head] = 0.0


def causal_conv(x: Tensor, taps: Tensor) -> Tensor:
    """SiLU of a depthwise causal convolution; x [B, T, P], taps [P, 4], tap 3 is for "now"."""
    T = x.shape[1]
    padded = F.pad(x, (0, 0, 3, 0))
    out = padded[:, 3:] * taps[:, 3]
    for j in range(3):
        out = torch.addcmul(out, padded[:, j : j + T], taps[:, j])
    return F.silu(out)


class MLA(nn.Module):
    def __init__(self, cfg: NanoConfig) -> None:
        super().__init__()
        self.cfg = cfg
        C, H = cfg.hidden, cfg.heads
        self.q_a_proj, self.q_a_layernorm = matrix(cfg.q_lora, C), ones(cfg.q_lora)
        self.q_b_proj = matrix(H * (cfg.nope + cfg.rope), cfg.q_lora)
        self.kv_a_proj_with_mqa = matrix(cfg.kv_lora + cfg.rope, C)
        self.kv_a_layernorm = ones(cfg.kv_lora)
        self.kv_b_proj = matrix(H * (cfg.nope + cfg.v_dim), cfg.kv_lora)
        self.g_proj = matrix(H * cfg.v_dim, C)
        self.o_proj = matrix(C, H * cfg.v_dim, 0.3)

    def forward(self, x: Tensor) -> Tensor:
        cfg = self.cfg
        B, T, _ = x.shape
        H, qk = cfg.heads, cfg.nope + cfg.rope
        fused = torch.cat((self.q_a_proj, self.kv_a_proj_with_mqa, self.g_proj))
        sizes = (cfg.q_lora, cfg.kv_lora, cfg.rope, H * cfg.v_dim)
        q_a, latent, k_rope, gate = F.linear(x, fused).split(sizes, dim=-1)
        q = F.linear(rms(q_a, self.q_a_layernorm, cfg.lora_eps), self.q_b_proj)
        q = q.view(B, T, H, qk).transpose(1, 2)
        kv = F.linear(rms(latent, self.kv_a_layernorm, cfg.lora_eps), self.kv_b_proj)
        k_nope, v = kv.view(B, T, H, cfg.nope + cfg.v_dim).split((cfg.nope, cfg.v_dim), dim=-1)
        k = torch.cat((k_nope, k_rope.unsqueeze(2).expand(B, T, H, cfg.rope)), dim=-1)
        # equal widths for k and v let torch take its blocked attention kernel on CPU
        v = F.pad(v, (0, qk - cfg.v_dim))
        att = F.scaled_dot_product_attention(
            q, k.transpose(1, 2), v.transpose(1, 2), is_causal=True, scale=qk**-0.5
        )
        att = att[..., : cfg.v_dim].transpose(1, 2).reshape(B, T, H * cfg.v_dim)
        return F.linear(att * torch.sigmoid(gate), self.o_proj)


class DenseFFN(nn.Module):
    def __init__(self, cfg: NanoConfig, width: int) -> None:
        super().__init__()
        self.cfg = cfg
        self.gate_proj, self.up_proj = matrix(width, cfg.hidden), matrix(width, cfg.hidden)
        self.down_proj = matrix(cfg.hidden, width, 0.3)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = F.linear(x, torch.cat((self.gate_proj, self.up_proj))).chunk(2, dim=-1)
        return F.linear(situ(gate, up, self.cfg), self.down_proj)


class LatentMoE(nn.Module):
    e_score_correction_bias: Tensor
    load: Tensor  # tokens per expert since the last balancing step

    def __init__(self, cfg: NanoConfig) -> None:
        super().__init__()
        self.cfg = cfg
        C, L, E, W = cfg.hidden, cfg.latent, cfg.experts, cfg.expert_width
        self.gate = matrix(E, C)
        self.register_buffer("e_score_correction_bias", torch.zeros(E))
        self.register_buffer("load", torch.zeros(E), persistent=False)
        self.routed_expert_down_proj, self.routed_expert_norm = matrix(L, C), ones(L)
        self.routed_expert_up_proj = matrix(C, L, 0.3)
        self.w1 = nn.Parameter(torch.randn(E, W, L) * L**-0.5)
        self.w3 = nn.Parameter(torch.randn(E, W, L) * L**-0.5)
        self.w2 = nn.Parameter(torch.randn(E, L, W) * W**-0.5)
        self.shared_experts = DenseFFN(cfg, cfg.shared_width)

    def forward(self, x: Tensor) -> Tensor:
        cfg = self.cfg
        flat = x.reshape(-1, cfg.hidden)
        N, K = flat.shape[0], cfg.top_k
        scores = torch.sigmoid(F.linear(flat, self.gate))
        picked = (scores.detach() + self.e_score_correction_bias).topk(K, dim=-1).indices
        chosen = scores.gather(1, picked)
        weights = chosen / (chosen.sum(-1, keepdim=True) + 1e-20)

        order = picked.flatten().argsort(stable=True)
        counts = torch.bincount(picked.flatten(), minlength=cfg.experts)
        if self.training:
            self.load += counts
        offsets = counts.cumsum(0).to(torch.int32)
        token = order // K
        z = F.linear(flat, self.routed_expert_down_proj).index_select(0, token)
        w13, w2 = torch.cat((self.w1, self.w3), dim=1), self.w2
        gate, up = F.grouped_mm(z, w13.transpose(1, 2), offs=offsets).chunk(2, dim=-1)
        y = F.grouped_mm(situ(gate, up, cfg), w2.transpose(1, 2), offs=offsets)
        y = y * weights.flatten().index_select(0, order).unsqueeze(-1)
        routed = torch.zeros(N, cfg.latent, dtype=y.dtype).index_add(0, token, y)
        routed = rms(routed, self.routed_expert_norm, cfg.eps)
        out = F.linear(routed, self.routed_expert_up_proj)
        return out.view_as(x) + self.shared_experts(x)


class Layer(nn.Module):
    self_attn: KDA | MLA
    ffn: DenseFFN | LatentMoE

    def __init__(self, cfg: NanoConfig, index: int) -> None:
        super().__init__()
        self.eps = cfg.eps
        self.starts_block = index % cfg.block == 0
        self.self_attention_res, self.mlp_res = Mix(cfg.hidden), Mix(cfg.hidden)
        self.input_layernorm, self.post_attention_layernorm = ones(cfg.hidden), ones(cfg.hidden)
        self.self_attn = MLA(cfg) if index in cfg.mla_layers else KDA(cfg)
        self.ffn = DenseFFN(cfg, cfg.dense_width) if index == 0 else LatentMoE(cfg)

    def forward(self, bank: list[Tensor], p: Tensor) -> tuple[list[Tensor], Tensor]:
        h = self.self_attention_res(bank, p)
        if self.starts_block:
            bank = [*bank, p]
        a = self.self_attn(rms(h, self.input_layernorm, self.eps))
        p = a if self.starts_block else p + a
        h = self.mlp_res(bank, p)
        return bank, p + self.ffn(rms(h, self.post_attention_layernorm, self.eps))


class NanoK3(nn.Module):
    """Token ids [B, T] -> logits [B, T, vocab]."""

    def __init__(self, cfg: NanoConfig) -> None:
        super().__init__()
        self.cfg = cfg
        self.embed_tokens = nn.Parameter(torch.randn(cfg.vocab, cfg.hidden) * 0.5)
        self.layers = nn.ModuleList(Layer(cfg, i) for i in range(cfg.layers))
        for layer in self.layers:
            if isinstance(layer.self_attn, KDA):
                seed_recall(layer.self_attn, 0)
        self.output_attn_res = Mix(cfg.hidden)
        self.norm = ones(cfg.hidden)
        self.lm_head = nn.Parameter(torch.randn(cfg.vocab, cfg.hidden) * 0.02)

    def forward(self, ids: Tensor) -> Tensor:
        p = F.embedding(ids, self.embed_tokens)
        bank: list[Tensor] = []
        for layer in self.layers:
            bank, p = layer(bank, p)
        h = self.output_attn_res(bank, p)
        return F.linear(rms(h, self.norm, self.cfg.eps), self.lm_head)

    def moe_layers(self) -> list[LatentMoE]:
        return [m for m in self.modules() if isinstance(m, LatentMoE)]

    @torch.no_grad()
    def balance_experts(self, rate: float) -> float:
        """Nudge selection biases against the load error; returns max load / mean load."""
        worst = 0.0
        for moe in self.moe_layers():
            mean = moe.load.mean()
            worst = max(worst, float(moe.load.max() / mean))
            moe.e_score_correction_bias += rate * torch.sign(mean - moe.load)
            moe.load.zero_()
        return worst
