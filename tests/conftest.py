"""Threads are pinned before torch loads: two threads on one busy core stall each other."""

import os
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
# From the first moment on: Ray's client reads it once in a process, each cluster at its start, and
# commands under test set it where this user has a token.
os.environ.setdefault("RAY_AUTH_MODE", "disabled")
# The tests that compare bits were verified on the AVX2 kernels; a machine with AVX-512 would take
# others, whose rows need not be independent of their number. Child processes inherit this.
os.environ.setdefault("ATEN_CPU_CAPABILITY", "avx2")
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX2")
os.environ.setdefault("MKL_ENABLE_INSTRUCTIONS", "AVX2")

# Read at the first import of a kernel: Triton runs on CPU tensors in these processes.
os.environ.setdefault("TRITON_INTERPRET", "1")

import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis.internal.conjecture import providers
from xdist.scheduler import LoadScopeScheduling
from xdist.workermanage import WorkerController

torch.set_num_threads(1)
# Wall-clock deadlines would make property tests depend on the machine's load.
settings.register_profile(
    "expertmesh", deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=True
)
settings.load_profile("expertmesh")
# It also draws the numbers and words of our own modules, of those that are loaded at the time: what
# a test tries would depend on the tests its worker has run before.
providers.is_local_module_file = lambda path: False

# Whole processes: after everything else.
LATE = ("tests/system/", "tests/actors/exchange/")
# Of those, the ones that hold deaths and hosts against deadlines: in turn, beside the others.
ALONE = tuple(
    f"tests/system/test_{name}.py"
    for name in ("busy", "chaos", "failover", "helm_pods", "hosts", "mesh", "node_scaling",
                 "scaling", "serve_seats")
)  # fmt: skip

# The longest of the others: first, so that no worker is left alone with one of them at the end.
LONG = tuple(
    f"tests/system/test_{name}.py"
    for name in ("serve_cli", "golden_server", "operator_commands", "fuzz_openapi", "dashboards")
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: (item.nodeid.startswith(LATE), not item.nodeid.startswith(LONG)))


class _Schedule(LoadScopeScheduling):
    """The tests of a file share a worker, and so their fixtures. Those that run in turn go to one
    worker from the start: they mostly wait, and the other deals with files meanwhile."""

    def _split_scope(self, nodeid: str) -> str:
        return "alone" if nodeid.startswith(ALONE) else nodeid.partition("::")[0]

    def _assign_work_unit(self, node: WorkerController) -> None:
        if "alone" in self.workqueue:
            self.workqueue.move_to_end("alone", last=False)
        super()._assign_work_unit(node)


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> LoadScopeScheduling:
    """How `make test` deals the tests to its two workers."""
    return _Schedule(config, log)
