"""Data-parallel worker threads, one core each, over one set of master weights.

One thread per core without a barrier in every operation keeps its speed when other programs use
the machine; threads inside an operation would wait for the slowest core thousands of times a step.
"""

from __future__ import annotations

import copy
import queue
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from expertmesh.deploy.training.model import NanoK3
from expertmesh.deploy.training.quant import dequantise, quantise

EXPERT_WEIGHTS = ("w1", "w2", "w3")


def token_losses(model: NanoK3, ids: Tensor) -> Tensor:
    """Cross-entropy of every next token: ids [B, T+1] -> [B*T]."""
    logits = model(ids[:, :-1])
    return F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten(), reduction="none")


@dataclass(frozen=True)
class Unit:
    """Rows for one forward and backward pass; `scale` multiplies the weighted loss sum."""

    name: str
    ids: Tensor
    weights: Tensor
    scale: float
    norm: float

    @staticmethod
    def split(name: str, ids: Tensor, weights: Tensor, share: float, tokens: int) -> list[Unit]:
        """Cut a batch [B, T+1] into units of about `tokens` tokens with a total loss share."""
        rows = max(1, tokens // (ids.shape[1] - 1))
        norm = 1.0 / float(weights[:, 1:].sum().clamp_min(1e-6))
        parts = zip(ids.split(rows), weights.split(rows), strict=True)
        return [Unit(name, i, w, share * norm, norm) for i, w in parts]


class Replicas:
    """Copies of the master model that share its storage, except for the expert weights.

    Experts have their own copy because they may be quantised: the forward pass sees exactly what
    the packed checkpoint would hold, and the gradient is applied to the master weights unchanged
    (the straight-through estimator), at the cost of one quantisation per step.
    """

    def __init__(self, master: NanoK3, workers: int) -> None:
        self.master = master
        self.models = [copy.deepcopy(master).train() for _ in range(workers)]
        self.pool = ThreadPoolExecutor(workers)
        own = dict(master.named_parameters())
        for model in self.models:
            for name, p in model.named_parameters():
                if name.rsplit(".", 1)[-1] not in EXPERT_WEIGHTS:
                    p.data = own[name].data

    @torch.no_grad()
    def load(self, quantise_experts: bool) -> None:
        """Refresh what is not shared: expert weights and routing biases."""
        for i, moe in enumerate(self.master.moe_layers()):
            copies = [model.moe_layers()[i] for model in self.models]
            for name in EXPERT_WEIGHTS:
                weight = getattr(moe, name)
                value = dequantise(*quantise(weight)) if quantise_experts else weight
                for other in copies:
                    getattr(other, name).copy_(value)
            for other in copies:
                other.e_score_correction_bias.copy_(moe.e_score_correction_bias)

    def backward(self, units: list[Unit]) -> dict[str, float]:
        """Run all units; leaves gradients and expert loads in the master, returns mean losses."""
        waiting: queue.SimpleQueue[Unit] = queue.SimpleQueue()
        for unit in sorted(units, key=lambda u: -u.ids.shape[1]):
            waiting.put(unit)
        results = list(self.pool.map(lambda m: drain(m, waiting), self.models))
        self.reduce()
        losses: dict[str, float] = {}
        for name, loss in (pair for result in results for pair in result):
            losses[name] = losses.get(name, 0.0) + loss
        return losses

    @torch.no_grad()
    def reduce(self) -> None:
        for p, *others in zip(
            self.master.parameters(), *(m.parameters() for m in self.models), strict=True
        ):
            grads = [o.grad for o in others if o.grad is not None]
            p.grad = sum(grads[1:], start=grads[0].clone()) if grads else None
            for o in others:
                o.grad = None
        copies = (m.moe_layers() for m in self.models)
        for moes in zip(self.master.moe_layers(), *copies, strict=True):
            for other in moes[1:]:
                moes[0].load += other.load
                other.load.zero_()


def drain(model: NanoK3, waiting: queue.SimpleQueue[Unit]) -> list[tuple[str, float]]:
    """Take units until none is left; gradients add up in `model`."""
    done: list[tuple[str, float]] = []
    while True:
        try:
            unit = waiting.get_nowait()
        except queue.Empty:
            return done
        total = (token_losses(model, unit.ids) * unit.weights[:, 1:].flatten()).sum()
        (total * unit.scale).backward()
        done.append((unit.name, float(total.detach()) * unit.norm))
