"""The files that are made from the definitions here, and whether those on disk still are."""

import json
from pathlib import Path

from expertmesh.deploy.observability import alerts, mesh_board, reference, rules, serving_board
from expertmesh.deploy.observability.grafana import dashboard

FOLDER = Path(__file__).parent / "generated"
BOARDS = (serving_board.BOARD, mesh_board.BOARD)


def files() -> dict[str, str]:
    """Contents by name, in FOLDER."""
    found = {f"{board.uid}.json": json.dumps(dashboard(board), indent=1) + "\n" for board in BOARDS}
    found["expertmesh-rules.yaml"] = rules.as_yaml(alerts.GROUPS)
    found["metrics.md"] = reference.page(BOARDS)
    return found


def stale(folder: Path = FOLDER) -> list[str]:
    """Names of files that are missing, differ, or should not be there."""
    wanted = files()
    there = {path.name: path.read_text() for path in folder.glob("*") if path.is_file()}
    return sorted(n for n in wanted.keys() | there.keys() if wanted.get(n) != there.get(n))


def write(folder: Path = FOLDER) -> list[str]:
    """Names of the files that were written or removed."""
    wanted, changed = files(), stale(folder)
    folder.mkdir(exist_ok=True)
    for name in changed:
        if name in wanted:
            (folder / name).write_text(wanted[name])
        else:
            (folder / name).unlink()
    return changed
