"""Writes dashboards, rules and the metrics page, or checks that they are up to date.

usage: python -m expertmesh.deploy.observability --write | --check
"""

import argparse
import sys

from expertmesh.deploy.observability.generate import FOLDER, stale, write


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m expertmesh.deploy.observability")
    group = parser.add_mutually_exclusive_group(required=True)
    group.add_argument("--write", action="store_true", help=f"write the files in {FOLDER}")
    group.add_argument("--check", action="store_true", help="exit 1 when one of them is stale")
    wish = parser.parse_args(arguments)
    if wish.write:
        for name in write():
            print(f"wrote {FOLDER / name}")
        return 0
    found = stale()
    for name in found:
        print(f"{FOLDER / name} is stale: run with --write", file=sys.stderr)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
