"""`python -m tests.bench NAME [options]` runs one benchmark and prints its result as JSON."""

import importlib
import json
import sys

NAMES = (
    "two_tier",
    "http",
    "transformers",
    "peers",
    "profile",
    "transfers",
    "groups",
    "planner",
    "replicas",
    "ledger",
    "masks",
    "compare",
    "state_certificates",
    "state_schedules",
    "state_isolation",
    "state_economy",
    "state_codecs",
    "state_crash",
    "state_sessions",
    "state_liveness",
    "state_restore",
)


def main(arguments: list[str]) -> int:
    if not arguments or arguments[0] not in NAMES:
        print(f"usage: python -m tests.bench {{{','.join(NAMES)}}} [--help]", file=sys.stderr)
        return 2
    bench = importlib.import_module(f"tests.bench.{arguments[0]}")
    print(json.dumps(bench.main(arguments[1:]), indent=2))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
