"""A real Prometheus that scrapes one server every second, and is asked for what it has seen."""

import math
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import yaml

from tests.support.http_server import free_port
from tests.support.server_process import wait_for
from tests.support.tools import require_tool


class Prometheus:
    def __init__(self, url: str) -> None:
        self._http = httpx.Client(base_url=url, timeout=10)

    def _get(self, path: str, **parameters: str) -> Any:
        answer = self._http.get(path, params=parameters).json()
        assert answer["status"] == "success", answer
        return answer["data"]

    def query(self, expr: str) -> list[float]:
        """Values of the series it gives now; NaN is no value."""
        data = self._get("/api/v1/query", query=expr)
        samples = data["result"] if data["resultType"] == "vector" else [{"value": data["result"]}]
        values = [float(sample["value"][1]) for sample in samples]
        return [value for value in values if not math.isnan(value)]

    def targets(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = self._get("/api/v1/targets")["activeTargets"]
        return found

    def firing(self) -> set[str]:
        """Names of alerts."""
        alerts = self._get("/api/v1/alerts")["alerts"]
        return {one["labels"]["alertname"] for one in alerts if one["state"] == "firing"}

    def rule_errors(self) -> list[str]:
        groups = self._get("/api/v1/rules")["groups"]
        return [rule["lastError"] for group in groups for rule in group["rules"]
                if rule.get("lastError")]  # fmt: skip


@contextmanager
def prometheus(target: str, rules: Path, key: str = "") -> Iterator[Prometheus]:
    """target: the server's URL. key: what it asks for."""
    binary, port = require_tool("prometheus"), free_port()
    scrape: dict[str, Any] = {
        "job_name": "expertmesh",
        "static_configs": [{"targets": [urlsplit(target).netloc]}],
    }
    if key:
        scrape["authorization"] = {"credentials": key}
    config = {
        "global": {"scrape_interval": "1s", "scrape_timeout": "1s", "evaluation_interval": "1s"},
        "rule_files": [str(rules.resolve())],
        "scrape_configs": [scrape],
    }
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        path, log = Path(folder, "prometheus.yml"), Path(folder, "log")
        path.write_text(yaml.safe_dump(config))
        url = f"http://127.0.0.1:{port}"
        with log.open("w") as output:
            process = subprocess.Popen(
                [binary, f"--config.file={path}", f"--storage.tsdb.path={folder}/data",
                 f"--web.listen-address=127.0.0.1:{port}"],
                stdout=output, stderr=subprocess.STDOUT,
            )  # fmt: skip
        try:
            wait_for(lambda: _ready(process, url), 30, log.read_text)
            yield Prometheus(url)
        finally:
            process.terminate()
            process.wait(20)


def _ready(process: "subprocess.Popen[bytes]", url: str) -> bool:
    assert process.poll() is None, "prometheus has ended"
    try:
        return httpx.get(f"{url}/-/ready", timeout=2).status_code == 200
    except httpx.HTTPError:
        return False
