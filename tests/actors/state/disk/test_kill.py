import ast
import os
import subprocess
import sys
from pathlib import Path

REPOSITORY = Path(__file__).parents[4]


def test_killed_writers_lose_no_promise(tmp_path: Path) -> None:
    """In a process of its own, which has no threads and may fork."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.actors.state.disk.kills", str(tmp_path / "store"), "4", "1"],
        cwd=REPOSITORY,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY / ".src"), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=150,
    )
    assert done.returncode == 0, done.stderr
    result = ast.literal_eval(done.stdout)
    assert result["kills"] == 4 and result["items_read"] > 0
