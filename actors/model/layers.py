"""The attention half of a layer: KDA, MLA, and the parts of the FFN that stay with it.

Shapes: T rows of the batch (padded to MIN_ROWS), H heads, D KDA head dim, R latent rank,
r rope dim. Equations: k3-model.md section 2. Linear layers that read the same input are one matmul.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from expertmesh.actors.model.batch import PAGE_TOKENS, ContextRows, Inputs
from expertmesh.actors.model.config import ModelConfig
from expertmesh.kernels.kda.types import KdaSave
from expertmesh.kernels.latent_moe.torch_ops import Glu
from expertmesh.kernels.linear.torch_ops import MIN_ROWS
from expertmesh.kernels.mla.types import MlaSpan
from expertmesh.kernels.registry import Kernels

# The published code builds both LoRA norms of MLA with its class default, not rms_norm_eps.
LORA_NORM_EPS = 1e-6

split = torch.split_with_sizes  # torch.split takes twice as long to get here

Read = Callable[[str], Tensor]  # name below the layer -> stored tensor


class Gated:
    """Dense MLP or shared experts: down( glu( gate x, up x ) )."""

    def __init__(self, kernels: Kernels, read: Read, glu: Glu) -> None:
        self.kernels, self.glu = kernels, glu
        pack = kernels.pack_linear
        self.gate_up = pack(torch.cat([read("gate_proj.weight"), read("up_proj.weight")]))
        self.down = pack(read("down_proj.weight"))

    def __call__(self, x_TH: Tensor) -> Tensor:
        return self.down(self.kernels.glu(self.gate_up(x_TH), self.glu))


class Kda:
    """Kimi Delta Attention (section 2.2). State: conv window and one matrix per head."""

    def __init__(self, config: ModelConfig, kernels: Kernels, read: Read, f32: Read) -> None:
        self.kernels = kernels
        self.heads, self.dim = config.kda_heads, config.kda_head_dim
        self.eps, self.lower_bound = config.rms_norm_eps, config.gate_lower_bound
        inner = self.heads * self.dim
        gate_in = "g_proj.weight" if config.full_rank_gate else "g_a_proj.weight"
        parts = [read(f"{n}_proj.weight") for n in "qkv"]
        parts += [read(gate_in), read("f_a_proj.weight"), read("b_proj.weight")]
        self.widths = [3 * inner, parts[3].shape[0], parts[4].shape[0], parts[5].shape[0]]
        pack = kernels.pack_linear
        self.project = pack(torch.cat(parts))
        self.gate_up = None if config.full_rank_gate else pack(read("g_b_proj.weight"))
        self.decay_up = pack(read("f_b_proj.weight"))
        conv_WC = torch.cat([f32(f"{n}_conv1d.weight") for n in "qkv"]).squeeze(1).t()
        self.conv_weight_CW = conv_WC.contiguous().t()  # the kernel reads it tap by tap
        # Stored per head, padded to a multiple with zeros in K3: the first `heads` count.
        self.a_log_H = f32("A_log").reshape(-1)[: self.heads].contiguous()
        self.dt_bias_HD = f32("dt_bias").view(self.heads, self.dim)
        self.w_norm = f32("o_norm.weight")
        self.out = pack(read("o_proj.weight"))

    def __call__(
        self,
        x_TH: Tensor,
        inputs: Inputs,
        conv: Tensor,
        state: Tensor,
        saved: tuple[Tensor, Tensor],
    ) -> Tensor:
        """saved: snapshots of conv and state, written as inputs.kda_saves says."""
        rows, decode = x_TH.shape[0], inputs.decode
        qkv, gate, decay, beta = split(self.project(x_TH), self.widths, dim=1)
        z_THD = self.decay_up(decay).view(rows, self.heads, self.dim)
        if self.gate_up is not None:
            gate = self.gate_up(gate)
        constants = (
            self.conv_weight_CW,
            self.a_log_H,
            self.dt_bias_HD,
            self.lower_bound,
            conv,
            state,
        )
        if decode == rows:
            o_THD = self.kernels.kda_decode(qkv, z_THD, beta, *constants, inputs.slots_D)
        else:
            o_THD = x_TH.new_zeros(rows, self.heads, self.dim, dtype=torch.float32)
            if decode:
                d = decode
                o_THD[:d] = self.kernels.kda_decode(
                    qkv[:d], z_THD[:d], beta[:d], *constants, inputs.slots_D
                )
            if inputs.kda_spans:
                saves = [
                    KdaSave(after, saved[0][snapshot], saved[1][snapshot])
                    for after, snapshot in inputs.kda_saves
                ]
                o_THD += self.kernels.kda_prefill(
                    qkv, z_THD, beta, *constants, inputs.kda_spans, saves
                )
        gate_THD = gate.view(rows, self.heads, self.dim)
        o_THD = self.kernels.gated_rms_norm(o_THD.type_as(x_TH), self.w_norm, gate_THD, self.eps)
        # The norm's weight is fp32 in the checkpoint and lifts the product to fp32.
        return self.out(o_THD.reshape(rows, -1).type_as(x_TH))


class Mla:
    """Gated NoPE multi-head latent attention (section 2.3) over a paged latent cache."""

    def __init__(self, config: ModelConfig, kernels: Kernels, read: Read) -> None:
        self.kernels = kernels
        self.heads, self.rank = config.num_heads, config.kv_lora_rank
        self.hidden = config.hidden_size
        self.nope, self.rope, self.v = (
            config.qk_nope_head_dim,
            config.qk_rope_head_dim,
            config.v_head_dim,
        )
        self.scale = (self.nope + self.rope) ** -0.5
        pack = kernels.pack_linear
        self.q_norm = self.q_up = None
        if config.q_lora_rank is None:
            parts = [read("q_proj.weight")]
        else:
            parts = [read("q_a_proj.weight")]
            self.q_norm, self.q_up = read("q_a_layernorm.weight"), pack(read("q_b_proj.weight"))
        parts.append(read("kv_a_proj_with_mqa.weight"))
        if config.mla_output_gate:
            parts.append(read("g_proj.weight"))
        self.widths = [part.shape[0] for part in parts]
        self.project = pack(torch.cat(parts))
        self.kv_norm = read("kv_a_layernorm.weight")
        kv_b = read("kv_b_proj.weight").view(self.heads, self.nope + self.v, self.rank)
        self.w_k_HdR = kv_b[:, : self.nope].contiguous()
        self.w_v_HvR = kv_b[:, self.nope :].contiguous()
        self.out = pack(read("o_proj.weight"))

    def __call__(
        self, x_TH: Tensor, inputs: Inputs, plan: Any, cache: Tensor, layer: int
    ) -> Tensor:
        """plan: what `mla_plan` has made of the decode rows, for all layers of the step. layer:
        number among the MLA layers."""
        rows, decode, norm = x_TH.shape[0], inputs.decode, self.kernels.rms_norm
        q, kv, *gate = split(self.project(x_TH), self.widths, dim=1)
        if self.q_up is not None:
            q = self.q_up(norm(q, self.q_norm, LORA_NORM_EPS))
        q_n, q_r = split(q.view(rows, self.heads, -1), [self.nope, self.rope], dim=2)
        latent, k_rope = split(kv, [self.rank, self.rope], dim=1)
        row = torch.cat([norm(latent, self.kv_norm, LORA_NORM_EPS), k_rope], dim=1)
        cache.index_copy_(0, inputs.cache_rows_T, row[: inputs.rows])
        out_THv = x_TH.new_zeros(rows, self.heads, self.v)
        if decode:
            out_THv[:decode] = self._decode(q_n, q_r, inputs, plan, cache, layer)
        if inputs.mla_spans:
            prefill_THv = self.kernels.mla_prefill(
                q_n, q_r, cache, self.w_k_HdR, self.w_v_HvR, inputs.mla_spans, self.scale
            )
            out_THv[decode : inputs.rows] = prefill_THv[decode : inputs.rows]
        for own in inputs.contexts:
            if not own.decode:
                span = slice(own.begin, own.end)
                out_THv[span] = self._prefill_context(q_n[span], q_r[span], own, cache, layer)
        out = out_THv.view(rows, -1)
        if gate:
            out = self.kernels.output_gate(out, gate[0])
        return self.out(out)

    def _prefill_context(
        self, q_n: Tensor, q_r: Tensor, own: ContextRows, cache: Tensor, layer: int
    ) -> Tensor:
        """A prompt piece over a context that is gathered for it. -> [T, H, v]."""
        gathered = own.context.gather(layer, cache, own.pages, own.length)
        pages = torch.arange(gathered.shape[0] // PAGE_TOKENS, device=cache.device)
        span = MlaSpan(0, own.end - own.begin, own.position, pages, own.tail)
        return self.kernels.mla_prefill(
            q_n, q_r, gathered, self.w_k_HdR, self.w_v_HvR, [span], self.scale
        )

    @torch.inference_mode()
    def query_moment(self) -> Tensor:
        """Mean of q q' over heads, [C, C] float64, of absorbed queries whose inputs (normalised in
        the model) have the unit matrix for theirs. Tells which directions of a cached row matter
        to scores, from the weights alone (kv-state 3.3 d)."""
        if self.q_norm is not None and self.q_up is not None:
            up, inputs = self.q_up, torch.diag(self.q_norm)
        else:
            inputs = torch.eye(self.hidden, dtype=self.w_k_HdR.dtype, device=self.w_k_HdR.device)
            up = self._query_part
        total_CC = torch.zeros(
            self.rank + self.rope, self.rank + self.rope, dtype=torch.float64, device=inputs.device
        )
        for i in range(0, inputs.shape[0], 64):  # a K3 layer's queries of all would be 340 MB
            rows = inputs[i : i + 64]
            q = up(F.pad(rows, (0, 0, 0, 64 - rows.shape[0]))).view(64, self.heads, -1)
            q_n, q_r = split(q, [self.nope, self.rope], dim=2)
            q_HTR = torch.bmm(q_n.transpose(0, 1).float(), self.w_k_HdR.float())
            q_HTC = torch.cat([q_HTR, q_r.transpose(0, 1).float()], dim=2).double()
            total_CC += torch.einsum("htc,htd->cd", q_HTC, q_HTC)
        return total_CC / self.heads

    def _query_part(self, x_TH: Tensor) -> Tensor:
        return split(self.project(x_TH), self.widths, dim=1)[0]

    def _decode(
        self, q_n: Tensor, q_r: Tensor, inputs: Inputs, plan: Any, cache: Tensor, layer: int
    ) -> Tensor:
        """Absorbed form: scores against the latents themselves. -> [D, H, v]."""
        count = inputs.decode
        padded = max(count, MIN_ROWS)  # rows beyond `count` are computed and dropped
        q_HBR = torch.bmm(q_n[:padded].transpose(0, 1), self.w_k_HdR)
        o_BHR = self.kernels.mla_decode(
            q_HBR[:, :count].transpose(0, 1),
            q_r[:count],
            cache,
            inputs.page_table_DN,
            inputs.lengths_D,
            self.scale,
            plan,
        )
        for own in inputs.contexts:
            if own.decode:
                q_HC = torch.cat([q_HBR[:, own.begin], q_r[own.begin]], dim=1)
                o_BHR[own.begin] = own.context.decode(
                    layer, q_HC, cache, own.pages, own.length, self.scale
                )
        if count < padded:
            o_BHR = torch.cat([o_BHR, o_BHR.new_zeros(padded - count, *o_BHR.shape[1:])])
        o_HBv = torch.bmm(o_BHR.transpose(0, 1), self.w_v_HvR.transpose(1, 2))
        return o_HBv[:, :count].transpose(0, 1)


class Router:
    """Full-width sigmoid router in fp32 (section 2.4)."""

    def __init__(self, config: ModelConfig, kernels: Kernels, f32: Read) -> None:
        self.kernels = kernels
        self.score = kernels.pack_linear(f32("gate.weight"))
        self.bias = f32("gate.e_score_correction_bias")
        self.top_k, self.renormalize = config.experts_per_token, config.renormalize
        self.scaling = config.routed_scaling

    def __call__(self, x_TH: Tensor) -> tuple[Tensor, Tensor]:
        return self.kernels.route(
            self.score(x_TH.float()), self.bias, self.top_k, self.renormalize, self.scaling
        )
