"""Versions of what serves, graphics devices, and which backend serves which operator."""

import platform
import re
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, requires, version

import torch
from packaging.requirements import Requirement

from expertmesh import __version__
from expertmesh.actors.model.graphs import why_no_graphs
from expertmesh.deploy.doctor.findings import Finding, judged
from expertmesh.kernels.launch import interpreted
from expertmesh.kernels.registry import OperatorSupport, operator_support

SECTION = "software"
GPU_SECTION = "devices"
QUERY_SECONDS = 15.0
OPTIONAL = ("triton", "llguidance", "grpcio")


def check_software() -> Iterator[Finding]:
    yield Finding(SECTION, "expertmesh", "ok", __version__)
    python = platform.python_version()
    yield judged(
        SECTION, "Python", python, sys.version_info >= (3, 11), "3.11 or newer is needed", "fail"
    )
    yield from _requirements()
    gloo, nccl = torch.distributed.is_gloo_available(), torch.distributed.is_nccl_available()
    yield judged(
        SECTION, "gloo", "in torch" if gloo else "not in this torch", gloo,
        "the exchange meets over gloo: install a build of torch that has it", "fail",
    )  # fmt: skip
    told = "not in this torch (CPU build)"
    if nccl:
        told = ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]
    yield Finding(SECTION, "NCCL", "ok", told)


def _requirements() -> Iterator[Finding]:
    """What this package's own metadata asks for, and what of the optional parts is there."""
    try:
        asked = [Requirement(line) for line in requires("expertmesh") or ()]
    except PackageNotFoundError:
        asked = []
    base = {one.name: one for one in asked if one.marker is None}
    for name, one in sorted(base.items()):
        try:
            found = version(name)
        except PackageNotFoundError:
            yield Finding(SECTION, name, "fail", "not installed", f"pip install '{one}'")
            continue
        if not one.specifier.contains(found, prereleases=True):
            yield Finding(SECTION, name, "fail", found, f"pip install '{one}'")
        elif name in ("torch", "ray", *OPTIONAL):
            yield Finding(SECTION, name, "ok", found)
    for name in OPTIONAL:
        if name not in base:
            try:
                told = version(name)
            except PackageNotFoundError:
                told = "not installed"
            yield Finding(SECTION, name, "ok", told)


def check_devices() -> Iterator[Finding]:
    """GPUs as torch sees them, against what the driver sees."""
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    for at in range(count):
        facts = torch.cuda.get_device_properties(at)
        value = f"{facts.name}, {facts.total_memory / 2**30:.0f} GiB, sm_{facts.major}{facts.minor}"
        yield Finding(GPU_SECTION, f"GPU {at}", "ok", value)
    seen = _driver()
    if seen is None:
        if count == 0:
            yield Finding(GPU_SECTION, "GPU", "ok", "none; everything runs on the CPU")
        return
    driver, gpus = seen
    cuda = torch.version.cuda or "none (CPU build)"
    yield judged(
        GPU_SECTION, "driver", f"{driver}, {gpus} GPUs; torch for CUDA {cuda}", count == gpus,
        f"torch sees {count} of them: install a CUDA build of torch that this driver can run, and "
        "check CUDA_VISIBLE_DEVICES", "fail" if count == 0 else "warn",
    )  # fmt: skip


def _device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


def check_kernels() -> Iterator[Finding]:
    """What the speed of the operators depends on beside their backend."""
    if interpreted():
        yield Finding(
            SECTION, "TRITON_INTERPRET", "warn", "kernels run in Triton's interpreter",
            "unset it: it is slow, and wrong in bfloat16 and float8; it is for tests",
        )  # fmt: skip
    if _device() == "cuda":
        why_no = why_no_graphs("auto", "cuda")
        value = why_no or "decode steps are recorded and replayed"
        advice = "decode starts its kernels one by one; see the operators below"
        yield judged(GPU_SECTION, "CUDA graphs", value, not why_no, advice)


def _driver() -> tuple[str, int] | None:
    """(driver version, number of GPUs); None without a driver."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return None
    query = [tool, "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, timeout=QUERY_SECONDS)
    except (OSError, subprocess.TimeoutExpired):
        return None
    lines = [line.strip() for line in done.stdout.splitlines() if re.match(r"\s*\d", line)]
    return (lines[0], len(lines)) if lines else None


def check_operators() -> tuple[list[OperatorSupport], Finding]:
    """The table, and whether every operator has a backend: on a GPU Triton, wherever it can."""
    table = operator_support(_device())
    chosen = {one.name: one for one in table if one.chosen}
    missing = sorted({one.name for one in table} - {one.name for one in chosen.values()})
    missing += [name for name, one in chosen.items() if one.reason]
    counts = Counter(one.backend for one in chosen.values())
    value = ", ".join(f"{count} by {backend}" for backend, count in counts.most_common())
    value += f"; none for {', '.join(missing)}" if missing else ""
    if missing:
        advice = "the installation is damaged: install the package again"
        return table, Finding(SECTION, "operators", "fail", value, advice)
    slow = _device() == "cuda" and "triton" not in counts
    advice = "torch is slow at most of them: pip install 'expertmesh[gpu]'"
    return table, judged(SECTION, "operators", value, not slow, advice)
