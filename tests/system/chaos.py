"""Faults without end: kills, stops and scalings of a server under streaming load.

    python -m tests.system.chaos --faults 200 --seed 0

prints one JSON object: what was done, how soon it was noticed and served again, and every stream
that failed or differed from its undisturbed answer. Exit status 1 if there was any.
"""

import argparse
import json
import random
import statistics
import sys
import time
from dataclasses import asdict
from typing import Any

from tests.support.http_server import free_port
from tests.support.server_process import server_process
from tests.support.siege import Fault, Result, Siege, random_fault

START_S = 240.0


class Chaos:
    """One server, one seeded sequence of faults."""

    def __init__(self, siege: Siege, seed: int, scale_every: int = 5) -> None:
        self._siege, self._draw, self._scale_every = siege, random.Random(seed), scale_every
        self.faults: list[Fault] = []
        self.results: list[Result] = []
        self.scalings: list[str] = []

    def run(self, faults: int) -> None:
        self._siege.learn()
        while len(self.faults) < faults:
            self._siege.wait_whole()
            self.results.append(self._siege.storm(self._harm))
            if len(self.faults) % self._scale_every == 0:
                self._siege.wait_whole()
                self.results.append(self._siege.storm(self._scale))

    def _harm(self) -> None:
        time.sleep(self._draw.uniform(0.0, 0.3))
        kind, member = random_fault(self._draw, self._siege.status())
        self.faults.append(self._siege.harm(kind, member))

    def _scale(self) -> None:
        pool = self._draw.choice(["experts", "attention"])
        status = self._siege.status()
        now, least = status["desired"][pool], 3 if pool == "experts" else 2
        wish = "+1" if now <= least else "-1"
        self._siege.post("/mesh/scale", {pool: wish})
        self.scalings.append(f"{pool} {wish}")
        self._siege.wait_whole()

    def report(self) -> dict[str, Any]:
        def spread(values: list[float | None]) -> dict[str, float | None]:
            known = sorted(value for value in values if value is not None)
            if not known:
                return {"median": None, "max": None}
            return {"median": round(statistics.median(known), 3), "max": round(known[-1], 3)}

        times = {}
        for kind in ("kill", "stop"):
            for pool in ("expert", "attention"):
                some = [f for f in self.faults if f.kind == kind and f"-{pool}-" in f.actor]
                if some:
                    times[f"{kind} {pool}"] = {
                        "count": len(some),
                        "noticed_s": spread([f.noticed_s for f in some]),
                        "served_s": spread([f.served_s for f in some]),
                    }
        wrong = [entry for result in self.results for entry in result.wrong]
        failed = [error for result in self.results for error in result.failed]
        status = self._siege.status()
        return {
            "faults": len(self.faults),
            "scalings": self.scalings,
            "streams": sum(result.streams for result in self.results),
            "tokens": sum(result.tokens for result in self.results),
            "failed": failed,
            "wrong": wrong,
            "times": times,
            "unnoticed": [asdict(f) for f in self.faults if f.noticed_s is None],
            "epoch": status["epoch"],
            "losses": status["losses"],
            "failovers": status["failovers"],
            "rebalances": status["rebalances"],
            "failed_rebalances": status["failed_rebalances"],
        }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--faults", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--streams", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=48)
    options = parser.parse_args()
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    arguments = ["--expert-actors", "3", "--attention-replicas", "2", "--port", str(port)]
    with server_process(*arguments) as server:
        server.wait_ready(url, START_S)
        siege = Siege(url, tokens=options.tokens, streams=options.streams)
        chaos = Chaos(siege, options.seed)
        began = time.monotonic()
        chaos.run(options.faults)
        report = chaos.report() | {"seconds": round(time.monotonic() - began, 1)}
        print(json.dumps(report, indent=1))
    return 1 if report["failed"] or report["wrong"] or report["unnoticed"] else 0


if __name__ == "__main__":
    sys.exit(main())
