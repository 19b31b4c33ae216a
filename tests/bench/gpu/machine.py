"""What the numbers were measured on, and what it can do at best."""

import os
import platform
import subprocess
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from tests.bench.gpu.timers import Timer

ROOT = Path(__file__).parents[3]
PACKAGES = ("torch", "triton", "numpy", "fla-core", "einops")
QUERY = (
    "name,driver_version,pstate,clocks.sm,clocks.mem,clocks.max.sm,clocks.max.mem,"
    "power.draw,power.limit,temperature.gpu,memory.total,ecc.mode.current"
)


def facts(device: torch.device) -> dict[str, Any]:
    found: dict[str, Any] = {
        "python": platform.python_version(),
        "kernel": platform.release(),
        "cores": len(os.sched_getaffinity(0)),
        "versions": {name: _version(name) for name in PACKAGES},
        "cuda": torch.version.cuda,
        "hip": torch.version.hip,
        "commit": _output("git", "describe", "--always", "--dirty"),
    }
    if device.type == "cuda":
        card = torch.cuda.get_device_properties(device)
        found |= {
            "gpu": card.name,
            "capability": list(torch.cuda.get_device_capability(device)),
            "multiprocessors": card.multi_processor_count,
            "memory_bytes": card.total_memory,
            "l2_bytes": card.L2_cache_size,
            "nvidia_smi": dict(
                zip(
                    QUERY.split(","),
                    _output("nvidia-smi", f"--query-gpu={QUERY}", "--format=csv,noheader").split(
                        ", "
                    ),
                    strict=False,
                )
            ),
        }
    return found


def ceilings(
    device: torch.device, timer: Timer, *, side: int = 8192, copied: int = 4 << 30
) -> dict[str, Callable[[], dict[str, Any]]]:
    """Name -> measurement. Random numbers: zeros multiply faster than data does.

    side: of the square matrices. copied: bytes of the buffer that is copied.
    """

    def copy() -> dict[str, Any]:
        source = torch.empty(copied // 4, dtype=torch.float32, device=device).normal_()
        target = torch.empty_like(source)
        times = timer.call_us(lambda: target.copy_(source))
        return times | {"bytes_per_s": 2 * copied / (1e-6 * times["median_us"])}

    def rate(product: Callable[[], Any]) -> dict[str, Any]:
        times = timer.call_us(product)
        return times | {"flops_per_s": 2 * side**3 / (1e-6 * times["median_us"])}

    def drawn(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        left, right = torch.randn(2, side, side, device=device)
        return left.to(dtype), right.to(dtype)

    def bf16() -> dict[str, Any]:
        left, right = drawn(torch.bfloat16)
        return rate(lambda: left @ right)

    def tf32() -> dict[str, Any]:
        left, right = drawn(torch.float32)
        allowed = torch.backends.cuda.matmul.allow_tf32
        torch.backends.cuda.matmul.allow_tf32 = True
        try:
            return rate(lambda: left @ right)
        finally:
            torch.backends.cuda.matmul.allow_tf32 = allowed

    def fp32() -> dict[str, Any]:
        left, right = drawn(torch.float32)
        return rate(lambda: left @ right)

    def fp8() -> dict[str, Any]:
        left, right = drawn(torch.float8_e4m3fn)
        one = torch.ones((), device=device)
        return rate(lambda: torch._scaled_mm(left, right.t(), one, one, out_dtype=torch.bfloat16))

    return {"copy": copy, "bf16": bf16, "fp8": fp8, "tf32": tf32, "fp32": fp32}


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _output(*command: str) -> str:
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"unknown: {error}"
    return done.stdout.strip() or f"unknown: {done.stderr.strip()}"
