"""What the chart repeats of other files: the table of values in its README, from the comments in
values.yaml, and the dashboards and rules, from deploy/observability/generated.

usage: python helm/generate.py [--check]; with --check it writes nothing and exits 1 if one is old.
"""

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import yaml

CHART = Path(__file__).resolve().parent / "expertmesh"
OBSERVABILITY = CHART.parents[1] / "deploy" / "observability" / "generated"
COPIES = ("expertmesh-mesh.json", "expertmesh-serving.json", "expertmesh-rules.yaml")
BEGIN, END = "<!-- values: made by helm/generate.py -->", "<!-- end of values -->"
_LINE = re.compile(r"^(?P<indent> *)(?P<key>[A-Za-z][A-Za-z0-9]*):")


class Value(NamedTuple):
    """A documented value: its dotted path, its default and what its comment says."""

    path: str
    default: Any
    text: str


def documented(source: str) -> Iterator[Value]:
    """Every value with a `# --` comment above it, in the file's order."""
    defaults = yaml.safe_load(source)
    parents: list[tuple[int, str]] = []
    comment = ""
    for line in source.splitlines():
        stripped = line.strip()
        if stripped.startswith("# -- "):
            comment = stripped.removeprefix("# -- ")
            continue
        key = _LINE.match(line)
        if key is None:
            continue
        indent = len(key["indent"])
        parents = [parent for parent in parents if parent[0] < indent] + [(indent, key["key"])]
        if comment:
            path = [name for _, name in parents]
            yield Value(".".join(path), _at(defaults, path), comment)
            comment = ""


def _at(values: Any, path: list[str]) -> Any:
    for name in path:
        values = values[name]
    return values


def table(values: Iterator[Value]) -> str:
    rows = ["| Value | Default | |", "|---|---|---|"]
    for value in values:
        shown = yaml.safe_dump(
            value.default, default_flow_style=True, width=10_000, sort_keys=False
        )
        default = shown.removesuffix("...\n").strip()
        if len(default) > 60:
            default = "see values.yaml"
        cells = (f"`{value.path}`", f"`{default}`", value.text)
        rows.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(rows)


def _flow(value: Any) -> str:
    """On one line, as in values.yaml."""
    text = yaml.safe_dump(value, default_flow_style=True, width=10_000, sort_keys=False)
    return text.removesuffix("...\n").strip()


def readme() -> str:
    """README.md with a table that is up to date."""
    text = (CHART / "README.md").read_text(encoding="utf-8")
    before, rest = text.split(BEGIN)
    after = rest.split(END)[1]
    made = table(documented((CHART / "values.yaml").read_text(encoding="utf-8")))
    return f"{before}{BEGIN}\n\n{made}\n\n{END}{after}"


def expected() -> dict[Path, str]:
    """By path, what each file should hold."""
    copies = {
        CHART / "files" / name: (OBSERVABILITY / name).read_text(encoding="utf-8")
        for name in COPIES
    }
    return {CHART / "README.md": readme()} | copies


def main(arguments: list[str]) -> int:
    if arguments not in ([], ["--check"]):
        print(__doc__, file=sys.stderr)
        return 2
    old = [
        path
        for path, text in expected().items()
        if not path.exists() or path.read_text(encoding="utf-8") != text
    ]
    for path in old:
        if arguments:
            print(f"{path.relative_to(CHART.parent)} is old: run python helm/generate.py")
        else:
            path.write_text(expected()[path], encoding="utf-8")
            print(f"wrote {path.relative_to(CHART.parent)}")
    return 1 if arguments and old else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
