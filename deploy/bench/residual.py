"""Attention Residuals of one decode step: mix and RMSNorm as two operators, and as one.

A step visits every site of the model in order: before the attention and before the FFN of each
layer, and before the head; each mixes as many sources as the bank holds by then, plus the running
sum (k3-model 2.1).
"""

import platform
from collections.abc import Callable
from dataclasses import dataclass

import msgspec
import torch
from torch import Tensor

from expertmesh.actors.model.config import ModelConfig
from expertmesh.actors.model.residual import ATTN_RES_EPS
from expertmesh.deploy.bench.counting import count
from expertmesh.deploy.bench.launches import Counted, count_launches, why_not
from expertmesh.deploy.bench.pairs import Clocks, alternate
from expertmesh.kernels.attn_res.torch_ops import attn_res_mix, attn_res_mix_norm
from expertmesh.kernels.norm.torch_ops import rms_norm

# Between float32 results that add up in different orders.
TOLERANCE = 1e-5


class Shape(msgspec.Struct, frozen=True):
    """What of a model matters here. block: layers per bank entry."""

    name: str
    hidden: int
    layers: int
    block: int

    @staticmethod
    def of(name: str, config: ModelConfig) -> "Shape | None":
        """None for a model with ordinary residuals."""
        if config.attn_res_block is None:
            return None
        return Shape(name, config.hidden_size, config.num_layers, config.attn_res_block)

    def sources(self) -> list[int]:
        """How many each site of a step mixes, in order."""
        found = []
        for layer in range(self.layers):
            found += [-(-layer // self.block) + 1, layer // self.block + 2]
        return [*found, -(-self.layers // self.block) + 1]


K3 = Shape("Kimi K3", 7168, 93, 12)


class Side(msgspec.Struct, frozen=True):
    """One way, per step."""

    operators: int
    bytes_moved: int


class Result(msgspec.Struct, frozen=True):
    """seconds: first is fused, second unfused. difference: largest, relative to max(1, |value|).
    triton: the kernels that a GPU would run; None where there is no Triton to ask."""

    shape: Shape
    tokens: int
    sites: int
    most_sources: int
    fused: Side
    unfused: Side
    seconds: Clocks
    difference: float
    equal: bool
    triton: Counted | None


@dataclass(frozen=True, slots=True)
class Step:
    """The operands of all sites, random."""

    sources: list[Tensor]  # per site [N, T, H], prefixes of one buffer as in the model
    scores: list[Tensor]
    norms: list[Tensor]

    @staticmethod
    def random(shape: Shape, tokens: int) -> "Step":
        generator = torch.Generator().manual_seed(0)

        def randn(*size: int) -> Tensor:
            return torch.randn(*size, generator=generator)

        sites = shape.sources()
        buffer = randn(max(sites), tokens, shape.hidden)
        return Step(
            [buffer[:n] for n in sites],
            [randn(shape.hidden) / shape.hidden for _ in sites],
            [1 + randn(shape.hidden) / 10 for _ in sites],
        )

    def fused(self) -> list[Tensor]:
        return [
            attn_res_mix_norm(v, score, norm, ATTN_RES_EPS, ATTN_RES_EPS)
            for v, score, norm in zip(self.sources, self.scores, self.norms, strict=True)
        ]

    def unfused(self) -> list[Tensor]:
        return [
            rms_norm(attn_res_mix(v, score, ATTN_RES_EPS), norm, ATTN_RES_EPS)
            for v, score, norm in zip(self.sources, self.scores, self.norms, strict=True)
        ]


@torch.inference_mode()
def compare(shape: Shape, tokens: int, rounds: int) -> Result:
    """tokens: rows of the step, one per running sequence."""
    step = Step.random(shape, tokens)
    difference = max(
        float(((a - b).abs() / b.abs().clamp(min=1)).max())
        for a, b in zip(step.fused(), step.unfused(), strict=True)
    )
    sites = shape.sources()
    return Result(
        shape, tokens, len(sites), max(sites), _side(step.fused), _side(step.unfused),
        alternate(step.fused, step.unfused, rounds), difference, difference <= TOLERANCE,
        None if why_not() else count_launches(sites, tokens, shape.hidden),
    )  # fmt: skip


def _side(run: Callable[[], object]) -> Side:
    work = count(run)
    return Side(work.launched, work.moved)


def conditions() -> dict[str, object]:
    """What the numbers depend on."""
    return {
        "torch": str(torch.__version__),
        "threads": torch.get_num_threads(),
        "kernels": torch.backends.cpu.get_cpu_capability(),
        "machine": platform.machine(),
        "dtype": "float32",
        "device": "cpu",
    }
