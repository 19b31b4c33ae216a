"""A Ray cluster whose autoscaler adds and removes nodes: processes that call themselves nodes.

Like ray.cluster_utils.AutoscalingCluster, which neither works from the wheel (a file is missing
there) nor leaves other clusters of the machine alive: it begins and ends with `ray stop --force`.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.support.http_server import free_port
from tests.support.server_process import MARK, marked_processes

HEAD_ID = "f" * 51 + "00000"
START_S = 120.0
# Keys that Ray's validation asks for and a fake cluster does not use.
UNUSED_LISTS = (
    "initialization_commands", "setup_commands", "head_setup_commands", "worker_setup_commands",
    "head_start_ray_commands", "worker_start_ray_commands", "cluster_synced_files",
    "rsync_exclude", "rsync_filter",
)  # fmt: skip


@contextmanager
def autoscaled_ray(worker: dict[str, float], most: int, idle_s: float) -> Iterator[str]:
    """Address of a cluster with a head that runs nothing, and up to `most` nodes with the
    resources `worker`, which come when asked for and go after idle_s."""
    folder, mark = Path(tempfile.mkdtemp(prefix="fn", dir="/tmp")), uuid.uuid4().hex
    address = f"127.0.0.1:{free_port()}"
    config = folder / "cluster.json"
    config.write_text(json.dumps(_config(address, worker, most, idle_s)))
    environment = os.environ | {
        MARK: mark,
        "RAY_FAKE_CLUSTER": "1",
        "RAY_enable_autoscaler_v2": "0",
        "RAY_OVERRIDE_NODE_ID_FOR_TESTING": HEAD_ID,
        "AUTOSCALER_UPDATE_INTERVAL_S": "1",
    }
    # --temp-dir: so that nobody who looks for a running cluster finds this one.
    command = [
        str(Path(sys.executable).parent / "ray"), "start", "--head", f"--port={address[10:]}",
        "--num-cpus=0", "--object-store-memory=100000000", "--include-dashboard=false",
        f"--temp-dir={folder}", f"--autoscaling-config={config}", "--disable-usage-stats",
    ]  # fmt: skip
    try:
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=START_S
        )
        assert done.returncode == 0, done.stdout + done.stderr
        yield address
    finally:
        for _ in range(2):  # the autoscaler may be starting a node at this moment
            for pid in marked_processes(mark):
                try:
                    os.kill(pid, signal.SIGKILL)
                except ProcessLookupError:
                    continue
        shutil.rmtree(folder, ignore_errors=True)


def autoscaler_log() -> str:
    """The end of what the autoscaler of the connected cluster has logged."""
    import ray

    logs = Path(ray._private.worker._global_node.get_logs_dir_path())
    return (logs / "monitor.log").read_text()[-3000:]


def _config(address: str, worker: dict[str, float], most: int, idle_s: float) -> dict[str, Any]:
    return {
        **{key: [] for key in UNUSED_LISTS},
        **{key: {} for key in ("auth", "docker", "file_mounts")},
        "file_mounts_sync_continuously": False,
        "cluster_name": "fake",
        "max_workers": most,
        "upscaling_speed": 1.0,
        "idle_timeout_minutes": idle_s / 60,
        "provider": {
            "type": "fake_multinode",
            "use_node_id_as_ip": True,
            "disable_node_updaters": True,
            "disable_launch_config_check": True,
            "head_node_id": HEAD_ID,
            "gcs_address": address,
        },
        "head_node_type": "ray.head.default",
        "available_node_types": {
            "ray.head.default": {"resources": {"CPU": 0}, "node_config": {}, "max_workers": 0},
            "worker": {
                "resources": {**worker, "object_store_memory": 100 << 20},
                "node_config": {},
                "min_workers": 0,
                "max_workers": most,
            },
        },
    }
