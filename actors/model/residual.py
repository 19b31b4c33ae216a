"""How layer outputs meet: Block Attention Residuals (K3) or the ordinary sum (48B).

Both answer the same four questions, so the model's layer loop knows no family.
"""

from collections.abc import Callable
from typing import Protocol

from torch import Tensor

from expertmesh.actors.model.config import ModelConfig
from expertmesh.kernels.registry import Kernels

ATTN_RES_EPS = 1e-5


class Residual(Protocol):
    """The inputs of attention and FFN come normalised, by the layer's norm weights and `eps`."""

    def attention_input(self, layer: int, norm_H: Tensor, eps: float) -> Tensor: ...
    def add_attention(self, a_TH: Tensor) -> None: ...
    def ffn_input(self, layer: int, norm_H: Tensor, eps: float) -> Tensor: ...
    def add_ffn(self, m_TH: Tensor) -> None: ...
    def output(self) -> Tensor:
        """Not normalised: of most rows nobody wants the logits."""
        ...


class PlainResidual:
    """x += Attn(norm x); x += FFN(norm x)."""

    def __init__(self, embedded_TH: Tensor, kernels: Kernels) -> None:
        self._x, self._norm = embedded_TH, kernels.rms_norm

    def attention_input(self, layer: int, norm_H: Tensor, eps: float) -> Tensor:
        return self._norm(self._x, norm_H, eps)

    def add_attention(self, a_TH: Tensor) -> None:
        self._x = self._x + a_TH

    ffn_input = attention_input
    add_ffn = add_attention

    def output(self) -> Tensor:
        return self._x


class AttnResWeights:
    """One score vector (norm ∘ proj, fp32 [H]) per site: attention, FFN of each layer, output."""

    def __init__(self, config: ModelConfig, read_f32: Callable[[str], Tensor]) -> None:
        def score(stem: str) -> Tensor:
            return read_f32(f"{stem}_norm.weight") * read_f32(f"{stem}_proj.weight").view(-1)

        layers = range(config.num_layers)
        self.block = config.attn_res_block or config.num_layers
        self.attention = [score(f"model.layers.{i}.self_attention_res") for i in layers]
        self.ffn = [score(f"model.layers.{i}.mlp_res") for i in layers]
        self.output = score("model.output_attn_res")
        self.sources = -(-config.num_layers // self.block) + 1


class BlockResidual:
    """Section 2.1. Bank and running sum share one buffer [N, T, H]: freezing a block is `n += 1`.

    sources = buffer[: n + 1], the running sum last.
    """

    def __init__(self, embedded_TH: Tensor, weights: AttnResWeights, kernels: Kernels) -> None:
        self._weights, self._kernels = weights, kernels
        self._buffer = embedded_TH.new_empty(weights.sources, *embedded_TH.shape)
        self._buffer[0] = embedded_TH
        self._restart = False
        self._freeze(0)

    def _freeze(self, count: int) -> None:
        """The first `count` sources change no more; views that every layer until the next block
        asks for are made once."""
        self._frozen = count
        self._sources_NTH, self._running_TH = self._buffer[: count + 1], self._buffer[count]

    def _normed(self, score_H: Tensor, norm_H: Tensor, eps: float) -> Tensor:
        if self._frozen == 0:
            return self._kernels.rms_norm(self._running_TH, norm_H, eps)
        return self._kernels.attn_res_mix_norm(
            self._sources_NTH, score_H, norm_H, ATTN_RES_EPS, eps
        )

    def attention_input(self, layer: int, norm_H: Tensor, eps: float) -> Tensor:
        # The mix before a block's first attention still sees the old bank; the push comes after.
        h_TH = self._normed(self._weights.attention[layer], norm_H, eps)
        self._restart = layer % self._weights.block == 0
        if self._restart:
            self._freeze(self._frozen + 1)
        return h_TH

    def add_attention(self, a_TH: Tensor) -> None:
        if self._restart:
            self._running_TH.copy_(a_TH)
        else:
            self._running_TH.add_(a_TH)

    def ffn_input(self, layer: int, norm_H: Tensor, eps: float) -> Tensor:
        return self._normed(self._weights.ffn[layer], norm_H, eps)

    def add_ffn(self, m_TH: Tensor) -> None:
        self._running_TH.add_(m_TH)

    def output(self) -> Tensor:
        return self._kernels.attn_res_mix(self._sources_NTH, self._weights.output, ATTN_RES_EPS)
