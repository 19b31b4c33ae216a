"""How much memory a part of the model will need, before it is loaded."""

from collections.abc import Mapping
from math import prod
from pathlib import Path

import psutil  # type: ignore[import-untyped]
import torch

from expertmesh.actors.model.config import ModelConfig
from expertmesh.actors.model.tensors import attention_part, expert_part

_CGROUP = Path("/sys/fs/cgroup")


class NotEnoughMemory(RuntimeError):
    """What was asked for does not fit. The message holds the sum, its parts and what there is."""


def attention_bytes(config: ModelConfig, dtype: torch.dtype) -> int:
    """Resident bytes of everything but the routed experts, held in `dtype`. What the published
    checkpoints keep in float32 stays in float32."""
    return sum(
        prod(spec.shape) * (4 if spec.dtypes[0] == "F32" else dtype.itemsize)
        for spec in attention_part(config)
    )


def expert_bytes(config: ModelConfig, packed: bool = True) -> int:
    """Bytes of one routed expert as stored: mxfp4 codes and scales, or bf16 matrices."""
    if not config.moe_layers:
        return 0
    return sum(spec.nbytes for spec in expert_part(config, config.moe_layers[0], 0, packed))


def decoded_expert_bytes(config: ModelConfig, dtype: torch.dtype) -> int:
    """Bytes of one routed expert decoded to `dtype`: three matrices."""
    return 3 * config.moe_intermediate_size * config.latent_size * dtype.itemsize


def available_bytes(cgroup: Path = _CGROUP) -> int:
    """Main memory this process may still take: the machine's or its control group's, the less."""
    available = int(psutil.virtual_memory().available)
    for limit_file, used_file in (
        ("memory.max", "memory.current"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"),
    ):
        try:
            limit = int((cgroup / limit_file).read_text())
            used = int((cgroup / used_file).read_text())
        except (OSError, ValueError):  # no such group version, or "max": no limit
            continue
        available = min(available, max(limit - used, 0))
    return available


def require_memory(what: str, needs: Mapping[str, int], available: int) -> None:
    """Raise NotEnoughMemory when the sum of `needs` (label -> bytes) exceeds `available` bytes."""
    total = sum(needs.values())
    if total > available:
        parts = ", ".join(f"{label} {human(nbytes)}" for label, nbytes in needs.items())
        raise NotEnoughMemory(
            f"{what}: needs {human(total)} ({parts}), {human(available)} available, "
            f"{human(total - available)} short"
        )


def human(nbytes: int) -> str:
    """`nbytes` with a decimal unit: 113.5 GB."""
    value, unit = float(nbytes), "B"
    for larger in ("kB", "MB", "GB", "TB"):
        if value < 1000:
            break
        value, unit = value / 1000, larger
    return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
