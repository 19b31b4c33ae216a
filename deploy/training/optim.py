"""Muon for hidden matrices and AdamW for everything else, under one schedule."""

from __future__ import annotations

from collections import defaultdict
from concurrent.futures import Executor
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

ADAM_NAMES = ("embed_tokens", "lm_head", "conv1d", "b_proj", "gate", "proj")


def orthogonalise(update: Tensor, steps: int = 5) -> Tensor:
    """Newton-Schulz iteration towards U V^T of each [R, C] matrix in a [S, R, C] stack."""
    a, b, c = 3.4445, -4.7750, 2.0315
    flip = update.shape[-2] > update.shape[-1]
    x = update.mT if flip else update
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(steps):
        gram = x @ x.mT
        x = a * x + (b * gram + c * (gram @ gram)) @ x
    return x.mT if flip else x


class Muon(torch.optim.Optimizer):
    """Momentum whose update is orthogonalised; equal shapes are handled in batches.

    The update has RMS 0.2 per element whatever the shape, so one learning rate fits AdamW too.
    """

    def __init__(self, params: list[nn.Parameter], momentum: float = 0.95) -> None:
        super().__init__(params, {"lr": 0.0, "momentum": momentum, "weight_decay": 0.0})

    @torch.no_grad()
    def step(self, closure: None = None, pool: Executor | None = None) -> None:  # type: ignore[override]
        """`pool` spreads the batches over its threads; the result does not depend on it."""
        run = pool.map if pool else map
        for group in self.param_groups:
            list(run(partial(self._update, group=group), batches(group)))

    @torch.no_grad()  # grad mode is per thread
    def _update(self, batch: list[nn.Parameter], group: dict[str, Any]) -> None:
        rows, cols = batch[0].shape[-2:]
        flat = torch.cat(
            [self._nesterov(p, group["momentum"]).reshape(-1, rows, cols) for p in batch]
        )
        flat = orthogonalise(flat) * (0.2 * max(rows, cols) ** 0.5)
        parts = flat.split([p.numel() // (rows * cols) for p in batch])
        for p, update in zip(batch, parts, strict=True):
            p.mul_(1 - group["lr"] * group["weight_decay"])
            p.add_(update.view_as(p), alpha=-group["lr"])

    def _nesterov(self, p: nn.Parameter, momentum: float) -> Tensor:
        buffer = self.state[p].setdefault("momentum", torch.zeros_like(p))
        assert p.grad is not None, "batches() leaves out what has no gradient"
        buffer.lerp_(p.grad, 1 - momentum)
        return p.grad.lerp(buffer, momentum)


def batches(group: dict[str, Any], most: int = 1 << 18) -> list[list[nn.Parameter]]:
    """Parameters with a gradient, by shape of their matrices, at most about `most` elements."""
    found: dict[tuple[int, ...], list[list[nn.Parameter]]] = defaultdict(lambda: [[]])
    for p in group["params"]:
        if p.grad is None:
            continue
        stacks = found[tuple(p.shape[-2:])]
        if sum(q.numel() for q in stacks[-1]) + p.numel() > most and stacks[-1]:
            stacks.append([])
        stacks[-1].append(p)
    return [batch for stacks in found.values() for batch in stacks]


def build(model: nn.Module) -> tuple[Muon, torch.optim.AdamW]:
    """Split the parameters by name: true hidden matrices go to Muon."""
    muon: list[nn.Parameter] = []
    adam: list[nn.Parameter] = []
    for name, p in model.named_parameters():
        last = name.rsplit(".", 1)[-1]
        small = last in ADAM_NAMES or last.endswith("conv1d") or p.ndim < 2
        (adam if small else muon).append(p)
    return Muon(muon), torch.optim.AdamW(adam, lr=0.0, betas=(0.9, 0.95), eps=1e-10, fused=True)


def rate(progress: float, warmup: float = 0.02, decay_from: float = 0.5) -> float:
    """Warm-up, plateau, linear decay to 2 %; `progress` runs from 0 to 1."""
    if progress < warmup:
        return max(progress / warmup, 0.02)
    if progress < decay_from:
        return 1.0
    return max(0.02, 1.0 - 0.98 * (progress - decay_from) / (1.0 - decay_from))
