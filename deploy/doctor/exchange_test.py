"""Two processes that exchange rows over loopback, in every layout; medians of the round trips.

The other process runs this module as a script. Its experts only scale their rows, so the answer
is known exactly.
"""

import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from typing import Literal

import msgspec
import torch
from torch import Tensor

from expertmesh.actors.exchange.base import ExchangeError
from expertmesh.actors.exchange.mesh import MeshExchange
from expertmesh.actors.exchange.process_group import open_store
from expertmesh.actors.exchange.roster import Roster
from expertmesh.actors.exchange.serve import MeshServer
from expertmesh.actors.exchange.settings import ExchangeSettings
from expertmesh.deploy.doctor.findings import Finding

SECTION = "exchange"
HOST = "127.0.0.1"
Layout = Literal["direct", "exact", "padded"]
LAYOUTS: Mapping[Layout, str] = {
    "direct": "direct (TCP per pair)",
    "exact": "gloo, point to point",
    "padded": "gloo, all-to-all",
}
WIDTH, TOP_K, EXPERTS, ROWS = 256, 2, 4, 8
WARM_UP, STEPS = 10, 60
START_SECONDS, DEADLINE_SECONDS = 60.0, 10.0


class RoundTrip(msgspec.Struct, frozen=True):
    """Seconds from a dispatch to its combined sum."""

    layout: str
    median_s: float
    p99_s: float


class WrongSum(RuntimeError):
    """What came back is not what was sent, scaled."""


class EchoBank:
    """Expert e of a row gives the row times e + 1."""

    def local_ids(self, layer: int, ids_TK: Tensor) -> Tensor:
        return ids_TK

    def partial_sum(self, layer: int, z_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor) -> Tensor:
        scale_TK = (ids_TK + 1).clamp(min=0) * weights_TK
        return z_TD.double() * scale_TK.sum(1, dtype=torch.float64, keepdim=True)


def check_exchange() -> tuple[list[RoundTrip], list[Finding]]:
    """Round trips of every layout that works, and a finding for each."""
    # Kept until all have met, or nobody answers at its address.
    _rendezvous, address = open_store(HOST)
    command = [sys.executable, "-m", __name__, *map(str, address)]
    trips: list[RoundTrip] = []
    findings: list[Finding] = []
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE) as other:
        try:
            for epoch, (layout, told) in enumerate(LAYOUTS.items(), start=1):
                trip = measure(address, epoch, layout)
                trips.append(trip)
                value = f"{trip.median_s * 1e6:.0f} us median, {trip.p99_s * 1e6:.0f} us p99"
                findings.append(Finding(SECTION, told, "ok", value))
        except (ExchangeError, WrongSum) as error:
            other.kill()
            said = other.stderr.read().decode(errors="replace") if other.stderr else ""
            reason = " | ".join([str(error), *said.strip().splitlines()[-1:]])
            advice = "a firewall on loopback, or another libgloo in the environment?"
            findings.append(Finding(SECTION, told, "fail", reason, advice))
        finally:
            other.terminate()
    return trips, findings


def measure(address: tuple[str, int], epoch: int, layout: Layout) -> RoundTrip:
    """The attention end. Raises ExchangeError and WrongSum."""
    exchange = MeshExchange(
        _roster(address, epoch), 0, _settings(layout), width=WIDTH, top_k=TOP_K,
        num_experts=EXPERTS, host=HOST,
    )  # fmt: skip
    try:
        return RoundTrip(layout, *_timed(exchange))
    finally:
        exchange.close()


def _timed(exchange: MeshExchange) -> tuple[float, float]:
    z_TD = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(0))
    ids_TK = torch.arange(ROWS * TOP_K).view(ROWS, TOP_K) % EXPERTS
    weights_TK = torch.full((ROWS, TOP_K), 0.5)
    expected = EchoBank().partial_sum(0, z_TD, ids_TK, weights_TK).float()
    seconds = []
    for _ in range(WARM_UP + STEPS):
        exchange.begin_step(ROWS)
        began = time.perf_counter()
        sums = exchange.combine(exchange.dispatch(0, z_TD, ids_TK, weights_TK))
        seconds.append(time.perf_counter() - began)
        exchange.end_step()
        if not torch.equal(sums, expected):
            raise WrongSum(f"step {exchange.step}: the sums that came back are wrong")
    taken = sorted(seconds[WARM_UP:])
    return statistics.median(taken), taken[int(len(taken) * 0.99)]


def serve(address: tuple[str, int]) -> None:
    """The expert end, one layout after the other."""
    torch.set_num_threads(1)
    for epoch, layout in enumerate(_layouts(), start=1):
        server = MeshServer(
            _roster(address, epoch), 1, _settings(layout), EchoBank(), width=WIDTH, top_k=TOP_K,
            dtype=torch.float32, host=HOST,
        )  # fmt: skip
        server.run()


def _layouts() -> Iterator[Layout]:
    yield from LAYOUTS


def _roster(address: tuple[str, int], epoch: int) -> Roster:
    return Roster(epoch, 1, 1, {0: [list(range(EXPERTS))]}, address)


def _settings(layout: Layout) -> ExchangeSettings:
    return ExchangeSettings(
        layout=layout, max_rows=64, deadline_s=DEADLINE_SECONDS, join_deadline_s=START_SECONDS
    )


if __name__ == "__main__":
    serve((sys.argv[1], int(sys.argv[2])))
