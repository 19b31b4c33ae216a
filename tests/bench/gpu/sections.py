"""The sections of a GPU day and what one item of each does."""

import gc
import sys
from dataclasses import dataclass
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import torch

from tests.bench.gpu import correctness, decode_step, machine, peers, timing
from tests.bench.gpu.operators import cases
from tests.bench.gpu.plan import Section
from tests.bench.gpu.pool import spoiled
from tests.bench.gpu.timers import EventTimer, Timer, WallTimer

CEILINGS = ("copy", "bf16", "fp8", "tf32", "fp32")


def sections(small: bool = False) -> list[Section]:
    """In the order of their importance. Correctness is checked by several processes at once, which
    also compile the kernels that are then timed; times are taken by one process alone.

    small: one case of each operator.
    """
    found = cases()
    one_each = {case.operator: name for name, case in reversed(found.items())}
    names = [name for name in found if not small or name in one_each.values()]
    return [
        Section("machine", ["facts"], 40, 40),
        Section("ceilings", list(CEILINGS), 30, 15),
        Section("correctness: K3", names, 130, 90, workers=6),
        Section("correctness: odd", correctness.odd_items(small), 80, 45, workers=6),
        Section("timing", names, 90, 40),
        Section("decode step", decode_step.ITEMS[: 1 if small else None], 70, 50),
        Section("baselines", names, 50, 20),
        Section("peers", peers.items(), 120, 100),
    ]


@dataclass(frozen=True)
class Day:
    """Runs items on one device."""

    device: torch.device
    timer: Timer
    cache_bytes: int
    small: bool

    def __call__(self, section: str, item: str) -> Any:
        with torch.inference_mode():
            result = self._run(section, item)
        if self.device.type == "cuda" and not spoiled(result):
            gc.collect()
            # Raises what an earlier call did wrong, while it is known which.
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
        return result

    def _run(self, section: str, item: str) -> Any:
        device, timer, cache = self.device, self.timer, self.cache_bytes
        match section:
            case "machine":
                return machine.facts(device)
            case "ceilings":
                sizes = {"side": 64, "copied": 1 << 16} if self.small else {}
                return machine.ceilings(device, timer, **sizes)[item]()
            case "correctness: K3" | "correctness: odd":
                return correctness.check(item, device, repeats=1 if self.small else 2)
            case "timing":
                return timing.time_kernel(cases()[item], device, timer, cache)
            case "baselines":
                return timing.time_baseline(cases()[item], device, timer, cache)
            case "decode step":
                return decode_step.measure(item, device, timer, self.small)
            case "peers":
                return peers.time_peer(item, device, timer)
        raise ValueError(f"no section {section!r}")


def on_gpu() -> Day:
    """Raises RuntimeError where there is no CUDA device."""
    device = torch.device("cuda", 0)
    torch.cuda.set_device(device)
    cache = torch.cuda.get_device_properties(device).L2_cache_size
    return Day(device, EventTimer(), cache, small=False)


def dry() -> Day:
    """Everything once, small, in Triton's interpreter; nothing it measures means anything."""
    from tests.support.triton_bf16 import install

    install()
    _pretend_fla()
    return Day(torch.device("cpu"), WallTimer(), 1, small=True)


def _pretend_fla() -> None:
    """Functions of fla's names that return a value: what calls them is to run."""
    for name in ("fla", "fla.ops", "fla.ops.kda", "fla.ops.attnres"):
        sys.modules[name] = ModuleType(name)
        sys.modules[name].__spec__ = ModuleSpec(name, None)
    kda, attnres = sys.modules["fla.ops.kda"], sys.modules["fla.ops.attnres"]
    kda.fused_recurrent_kda = kda.chunk_kda = lambda **inputs: inputs["v"]  # type: ignore[attr-defined]
    attnres.fused_attnres = lambda *inputs: inputs[0]  # type: ignore[attr-defined]
