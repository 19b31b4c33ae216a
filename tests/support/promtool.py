"""Prometheus' own checker, run on text."""

import subprocess
import tempfile
from pathlib import Path

from tests.support.tools import require_tool


def check_rules(text: str) -> str:
    """Output of `promtool check rules`. Fails the test when it finds a fault."""
    return _run("check", "rules", files={"rules.yaml": text}, check=["rules.yaml"])


def check_metrics(exposition: bytes) -> str:
    """What `promtool check metrics` has to say; "" when it is content."""
    done = subprocess.run(
        [require_tool("promtool"), "check", "metrics"], input=exposition, capture_output=True
    )
    return (done.stdout + done.stderr).decode()


def run_rule_tests(tests: dict[str, str], rules: dict[str, str]) -> str:
    """Files of unit tests and of the rules they refer to, by name. Fails with promtool's words."""
    return _run("test", "rules", files=tests | rules, check=list(tests))


def _run(*command: str, files: dict[str, str], check: list[str]) -> str:
    promtool = require_tool("promtool")
    with tempfile.TemporaryDirectory() as folder:
        for name, content in files.items():
            Path(folder, name).write_text(content)
        done = subprocess.run(
            [promtool, *command, *check], cwd=folder, capture_output=True, text=True
        )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-6000:]
    return done.stdout + done.stderr
