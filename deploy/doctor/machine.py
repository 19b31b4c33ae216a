"""Cores, memory, shared memory and limits of this machine, as this process may use them."""

import os
import resource
import shutil
from collections.abc import Iterator
from pathlib import Path

import psutil
import torch

from expertmesh.actors.process import own_cores
from expertmesh.cluster.settings import OBJECT_STORE_BYTES
from expertmesh.deploy.doctor.findings import Finding, judged
from expertmesh.deploy.preflight import RAY_BYTES, available_memory, size_text

SECTION = "machine"
CGROUP = Path("/sys/fs/cgroup")
SHM = Path("/dev/shm")
# Ray puts its own headers beside the store: a segment of exactly the store's size is refused.
SHM_NEEDED = OBJECT_STORE_BYTES + (16 << 20)
SHM_PER_GPU = 1 << 30  # NCCL's buffers between the processes of a host
# Each expert actor and attention replica holds sockets to all others, and Ray many more.
OPEN_FILES = 65536
_FLAGS = ("avx2", "fma", "avx512f", "avx512_bf16", "amx_bf16", "neon", "asimd", "sve")


def check_machine(gpus: int) -> Iterator[Finding]:
    yield from _cores()
    yield from _memory()
    yield _shared_memory(gpus)
    yield from _limits(gpus)


def _cores() -> Iterator[Finding]:
    cores, all_cores = own_cores(), os.cpu_count() or 1
    yield Finding(SECTION, "cores", "ok", f"{cores} of {all_cores} may be used")
    share = cpu_quota(CGROUP)
    if share is not None:
        yield judged(
            SECTION, "CPU quota", f"{share:g} cores", share >= cores,
            f"the cgroup grants less than the {cores} cores in sight: threads will be stopped in "
            "turn; give the container whole cores, or limit its CPU set",
        )  # fmt: skip
    load = os.getloadavg()[0]
    yield judged(
        SECTION, "load", f"{load:.1f}", load <= 2 * cores,
        "other processes use the cores; latencies measured now mean little",
    )  # fmt: skip
    capability = torch.backends.cpu.get_cpu_capability()
    flags = [flag for flag in _FLAGS if flag in _cpu_flags()]
    yield judged(
        SECTION, "CPU kernels", f"{capability}; {' '.join(flags) or 'no known vector units'}",
        capability != "DEFAULT",
        "torch found no vector unit (or ATEN_CPU_CAPABILITY says default): every step is several "
        "times slower",
    )  # fmt: skip
    threads = os.environ.get("OMP_NUM_THREADS")
    wanted = int(threads) if threads and threads.isdigit() else None
    yield judged(
        SECTION, "threads",
        f"OMP_NUM_THREADS {threads or 'unset'}, torch uses {torch.get_num_threads()}",
        wanted is None or wanted <= cores,
        f"more threads than cores starve one another; unset it, or use at most {cores}",
    )  # fmt: skip


def _cpu_flags() -> set[str]:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return set()
    for line in lines:
        if line.lower().startswith(("flags", "features")):
            return set(line.split(":", 1)[1].split())
    return set()


def _memory() -> Iterator[Finding]:
    total, free = psutil.virtual_memory().total, available_memory()
    yield judged(
        SECTION, "memory", f"{size_text(free)} available of {size_text(total)}",
        free > 2 * RAY_BYTES,
        f"Ray and the front door alone take about {size_text(RAY_BYTES)}",
    )  # fmt: skip
    limit = memory_limit(CGROUP)
    if limit is not None and limit < total:
        yield Finding(SECTION, "memory limit", "ok", f"{size_text(limit)} (cgroup)")
    swap = psutil.swap_memory().total
    if swap:
        yield Finding(SECTION, "swap", "ok", size_text(swap))


def cpu_quota(root: Path) -> float | None:
    """Cores that the cgroup grants (v2, else v1); None without a limit."""
    try:
        quota, period = (root / "cpu.max").read_text().split()
    except (OSError, ValueError):
        try:
            quota = (root / "cpu/cpu.cfs_quota_us").read_text().strip()
            period = (root / "cpu/cpu.cfs_period_us").read_text().strip()
        except OSError:
            return None
    return None if quota in ("max", "-1") else int(quota) / int(period)


def memory_limit(root: Path) -> int | None:
    """Bytes that the cgroup grants (v2, else v1); None without a limit."""
    for name in ("memory.max", "memory/memory.limit_in_bytes"):
        try:
            text = (root / name).read_text().strip()
        except OSError:
            continue
        # v1 writes "no limit" as the largest multiple of a page.
        return int(text) if text.isdigit() and int(text) < 1 << 60 else None
    return None


def _shared_memory(gpus: int) -> Finding:
    if not SHM.is_dir():
        return Finding(
            SECTION, "/dev/shm", "fail", "not there",
            "mount a tmpfs there: Ray's object store and NCCL need it",
        )  # fmt: skip
    size = shutil.disk_usage(SHM)
    return judge_shared_memory(size.total, size.free, gpus)


def judge_shared_memory(total: int, free: int, gpus: int) -> Finding:
    """A local start takes OBJECT_STORE_BYTES of it; a store that does not fit moves to the disk."""
    needed = SHM_NEEDED + gpus * SHM_PER_GPU
    value = f"{size_text(free)} free of {size_text(total)}"
    return judged(
        SECTION, "/dev/shm", value, free >= needed,
        f"{size_text(needed)} are needed ({size_text(SHM_NEEDED)} for Ray's object store"
        + (f", {size_text(SHM_PER_GPU)} for NCCL per GPU" if gpus else "")
        + "): docker run --shm-size, or a memory-backed emptyDir on /dev/shm",
    )  # fmt: skip


def _limits(gpus: int) -> Iterator[Finding]:
    files, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    yield judged(
        SECTION, "open files", f"{_limit(files)} (hard {_limit(most)})",
        files == resource.RLIM_INFINITY or files >= OPEN_FILES,
        f"`ulimit -n {OPEN_FILES}` before the start, or LimitNOFILE / --ulimit nofile",
    )  # fmt: skip
    locked, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    yield judged(
        SECTION, "locked memory", _limit(locked),
        not gpus or locked == resource.RLIM_INFINITY,
        "NCCL over RDMA needs `ulimit -l unlimited` (--ulimit memlock=-1)",
    )  # fmt: skip


def _limit(value: int) -> str:
    return "unlimited" if value == resource.RLIM_INFINITY else str(value)
