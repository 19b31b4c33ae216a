"""What keeps the packaging trick and the code's shape true."""

import ast
import statistics
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("kernels", "actors", "cluster", "deploy")
ORDER = {name: rank for rank, name in enumerate(FOLDERS)}


def sources() -> list[Path]:
    return [path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py")]


def test_import_root_is_four_relative_links() -> None:
    for name in FOLDERS:
        link = ROOT / ".src" / "expertmesh" / name
        assert link.is_symlink(), f"{link} must be a link"
        assert str(link.readlink()) == f"../../{name}"


def test_top_folders_are_namespace_portions() -> None:
    # Ray puts the driver's folder first on every worker's path: a regular package named `kernels`
    # there would hide the published one.
    for name in FOLDERS:
        assert not (ROOT / name / "__init__.py").exists()


def test_every_code_folder_is_a_package_for_the_wheel() -> None:
    for path in sources():
        if path.parent.name not in FOLDERS:
            assert (path.parent / "__init__.py").exists(), f"{path.parent} lacks __init__.py"


def test_imports_point_one_way() -> None:
    for path in sources():
        own = ORDER[path.relative_to(ROOT).parts[0]]
        for node in ast.walk(ast.parse(path.read_text())):
            names = []
            if isinstance(node, ast.ImportFrom):
                assert node.level == 0, f"{path}: relative import"
                names = [node.module or ""]
            elif isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            for name in names:
                parts = name.split(".")
                if parts[0] == "expertmesh" and len(parts) > 1 and parts[1] in ORDER:
                    assert ORDER[parts[1]] <= own, f"{path} imports {name}"


def test_files_stay_readable() -> None:
    lengths = {path: len(path.read_text().splitlines()) for path in sources()}
    code = [n for path, n in lengths.items() if path.name != "__init__.py"]
    assert max(lengths.values()) <= 500, max(lengths, key=lambda path: lengths[path])
    assert statistics.median(code) <= 150
