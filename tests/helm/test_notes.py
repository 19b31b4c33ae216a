"""What helm tells after an installation."""

import json
from pathlib import Path
from typing import Any

from tests.helm.chart import CHART, PRESETS
from tests.support.helm_tool import run_helm


def notes(preset: Path | None = None, **values: Any) -> str:
    files = [] if preset is None else ["-f", preset]
    changed = [f"--set-json={key}={json.dumps(value)}" for key, value in values.items()]
    done = run_helm("install", "mesh", CHART, "-n", "llm", "--dry-run=client", *files, *changed)
    assert done.returncode == 0, done.stderr
    return done.stdout.partition("NOTES:")[2]


def test_how_to_ask_and_what_is_missing() -> None:
    told = notes()
    assert "kubectl -n llm port-forward svc/mesh-expertmesh 8000:80" in told
    assert '"model": "nano"' in told and "helm test mesh -n llm" in told
    assert "WARNING: no API keys" in told
    assert "WARNING: this cluster does not know RayService" in told
    assert "need as many free GPUs again" in told


def test_keys_and_a_claim() -> None:
    gke = next(path for path in PRESETS if "gke" in path.name)
    claim = {"existingClaim": "", "create": True, "accessModes": ["ReadWriteOnce"]}
    told = notes(gke, **{f"model.pvc.{key}": value for key, value in claim.items()})
    assert '"Authorization: Bearer $API_KEY"' in told and "no API keys" not in told
    assert "Without one it stays Pending" in told
    assert "can be mounted by one node only" in told
    assert "starts empty" in told
    assert "second cluster" not in told
