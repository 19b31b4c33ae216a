"""What a result has to say about where it was measured."""

import os
import platform
import subprocess
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

import psutil


def cores() -> int:
    """Cores this process may run on."""
    return len(os.sched_getaffinity(0))


def facts() -> dict[str, Any]:
    """load_before and steal tell how much else was running: ratios of one run bear that, absolute
    numbers do not."""
    return {
        "cpu": _cpu_name(),
        "cores": cores(),
        "memory_gb": round(psutil.virtual_memory().total / 2**30, 1),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "versions": {name: version(name) for name in ("torch", "ray", "numpy")},
        "commit": _commit(),
        "time_utc": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "load_before": os.getloadavg()[0],
        "other_cpu_percent": others_percent(),
    }


def others_percent(seconds: float = 0.5) -> float:
    """CPU use of everything else right now, in percent of all cores; call while idle."""
    return psutil.cpu_percent(interval=seconds)


def _cpu_name() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.processor()


def _commit() -> str:
    root = Path(__file__).resolve().parents[2]
    done = subprocess.run(
        ["git", "describe", "--always", "--dirty"], cwd=root, capture_output=True, text=True
    )
    return done.stdout.strip() or "unknown"
