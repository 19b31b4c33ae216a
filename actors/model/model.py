"""The attention half of the model: everything but the routed experts (k3-model.md section 2).

One forward serves K3 and the 48B family, decode and prefill, one process or two tiers: the
routed experts are behind an Exchange, the residual scheme behind a Residual.
"""

from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from expertmesh.actors.exchange.base import Exchange
from expertmesh.actors.experts.bank import glu_of
from expertmesh.actors.model.batch import Batch
from expertmesh.actors.model.config import ModelConfig
from expertmesh.actors.model.forward import Runner, Sending
from expertmesh.actors.model.graphs import Choice, runner_for
from expertmesh.actors.model.layers import Gated, Kda, Mla, Router
from expertmesh.actors.model.residual import AttnResWeights
from expertmesh.actors.model.upload import Uploads, uploads_for
from expertmesh.actors.state.model_state import ModelState
from expertmesh.kernels.registry import Kernels


class TensorSource(Protocol):
    def tensor(self, name: str) -> Tensor: ...


@dataclass
class RoutingTrace:
    """Chosen experts of every batch row, sorted ascending, per MoE layer: layer -> int64 [T, K]."""

    layers: dict[int, Tensor] = field(default_factory=dict)

    def rows(self, begin: int, end: int) -> Tensor:
        """int16 [end - begin, MoE layers, K]."""
        return torch.stack([self.layers[i][begin:end] for i in sorted(self.layers)], dim=1).to(
            torch.int16
        )


class LatentMoe:
    """Section 2.4. The routed sum comes from the exchange; shared experts run while it travels."""

    def __init__(
        self,
        config: ModelConfig,
        kernels: Kernels,
        read: Callable[[str], Tensor],
        f32: Callable[[str], Tensor],
    ) -> None:
        self.kernels, self.eps = kernels, config.rms_norm_eps
        self.router = Router(config, kernels, f32)
        self.down = self.up = self.w_norm = None
        if config.has_latent:
            self.down = kernels.pack_linear(read("routed_expert_down_proj.weight"))
            self.up = kernels.pack_linear(read("routed_expert_up_proj.weight"))
        if config.latent_norm:
            self.w_norm = read("routed_expert_norm.weight")
        self.shared: Gated | None = None
        if config.num_shared_experts:
            self.shared = Gated(
                kernels, lambda name: read(f"shared_experts.{name}"), glu_of(config)
            )

    def latent(self, x_TH: Tensor) -> Tensor:
        return x_TH if self.down is None else self.down(x_TH)

    def finish(self, routed_TD: Tensor, x_TH: Tensor, shared_TH: Tensor | None) -> Tensor:
        out = routed_TD.type_as(x_TH)
        if self.w_norm is not None:
            out = self.kernels.rms_norm(out, self.w_norm, self.eps)
        if self.up is not None:
            out = self.up(out)
        return out if shared_TH is None else out + shared_TH


class Model:
    """Weights of the attention half on one device, and the forward pass over them."""

    def __init__(
        self,
        config: ModelConfig,
        kernels: Kernels,
        source: TensorSource,
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        uploads: Uploads | None = None,
        graphs: Choice = "auto",
    ) -> None:
        """uploads: how index tensors get to the device; by default what the device takes. graphs:
        whether decode passes are recorded; raises GraphsUnavailable for "on" where they cannot."""
        self.config, self.kernels = config, kernels
        self.dtype, self.device = dtype, torch.device(device)
        self.uploads = uploads or uploads_for(self.device)
        self.runner: Runner = runner_for(self, graphs)

        def read(name: str) -> Tensor:
            return source.tensor(name).to(self.device, dtype, copy=True)

        def f32(name: str) -> Tensor:
            return source.tensor(name).to(self.device, torch.float32, copy=True)

        self.w_embed = read("model.embed_tokens.weight")
        self.head = kernels.pack_linear(read("lm_head.weight"))
        self.w_norm = read("model.norm.weight")
        self.attn_res = AttnResWeights(config, f32) if config.attn_res_block else None
        self.norms: list[tuple[Tensor, Tensor]] = []
        self.attention: list[Kda | Mla] = []
        self.state_index: list[int] = []  # layer -> its row of the KDA or the MLA state
        self.ffn: list[Gated | LatentMoe] = []
        for i in range(config.num_layers):
            below = f"model.layers.{i}."
            self.norms.append(
                (
                    read(f"{below}input_layernorm.weight"),
                    read(f"{below}post_attention_layernorm.weight"),
                )
            )
            self.state_index.append(
                config.kda_index(i) if config.is_kda(i) else config.mla_index(i)
            )
            attn, attn32 = _below(read, f"{below}self_attn."), _below(f32, f"{below}self_attn.")
            self.attention.append(
                Kda(config, kernels, attn, attn32)
                if config.is_kda(i)
                else Mla(config, kernels, attn)
            )
            if config.is_moe(i):
                moe = f"{below}block_sparse_moe."
                self.ffn.append(LatentMoe(config, kernels, _below(read, moe), _below(f32, moe)))
            else:
                self.ffn.append(Gated(kernels, _below(read, f"{below}mlp."), glu_of(config)))

    def new_state(self, pages: int, slots: int, snapshots: int = 0) -> ModelState:
        return ModelState(self.config, pages, slots, self.dtype, self.device, snapshots)

    @torch.inference_mode()
    def forward(
        self,
        batch: Batch,
        state: ModelState,
        exchange: Exchange,
        trace: RoutingTrace | None = None,
        *,
        ping_pong: bool = False,
    ) -> Tensor:
        """One step. Writes the state of every span; returns logits fp32 [R, V].

        ping_pong: two micro-batches in flight, so that the exchange of one hides behind the
        attention of the other. The plain loop is its slow twin: same bits, row by row.
        """
        halves = batch.split() if ping_pong and trace is None else None
        exchange.begin_step(batch.rows, 1 if halves is None else 2)
        if halves is None:
            logits_RV = _run(self._stages(batch, state, exchange, trace, 0))
        else:
            left, right = (
                self._stages(half, state, exchange, None, micro)
                for micro, half in enumerate(halves)
            )
            logits_RV = torch.cat(_run_both(left, right))
        exchange.end_step()
        return logits_RV

    def _stages(
        self,
        batch: Batch,
        state: ModelState,
        exchange: Exchange,
        trace: RoutingTrace | None,
        micro: int,
    ) -> Generator[None, None, Tensor]:
        """Drives one pass; pauses between each dispatch and its combine."""
        run = self.runner.begin(batch, state, micro)
        made = run.advance(None)
        while isinstance(made, Sending):
            pending = exchange.dispatch(made.layer, made.z_TD, made.ids_TK, made.weights_TK, micro)
            if trace is not None:
                trace.layers[made.layer] = made.ids_TK.sort(dim=1).values
            run.share()
            yield
            made = run.advance(exchange.combine(pending))
        return made


def _below(read: Callable[[str], Tensor], prefix: str) -> Callable[[str], Tensor]:
    return lambda name: read(prefix + name)


def _run(stages: Generator[None, None, Tensor]) -> Tensor:
    while True:
        try:
            next(stages)
        except StopIteration as done:
            return done.value  # type: ignore[no-any-return]


def _run_both(
    left: Generator[None, None, Tensor], right: Generator[None, None, Tensor]
) -> tuple[Tensor, Tensor]:
    """Alternates: while one half's rows are with the experts, the other half computes."""
    results: list[Tensor] = []
    while len(results) < 2:
        for stages in (left, right):
            try:
                next(stages)
            except StopIteration as done:
                results.append(done.value)
    return results[0], results[1]
