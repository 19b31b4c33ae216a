"""Versions of Ray and Python that a cluster file names, against this installation's.

Ray joins only what agrees in both, to the last digit; the refusal is in a log on the worker.
"""

import platform
import re
from collections.abc import Iterator
from importlib.metadata import version

from expertmesh.deploy.hosts.findings import Finding

# rayproject/ray:2.60.0-py311-gpu
_RAY_IMAGE = re.compile(r"(?:^|/)ray(?:-ml|-llm)?:(\d+\.\d+\.\d+)(?:\.\w+)?(?:-py(\d)(\d+))?")
# pip install ray==2.60.0, "ray[serve]==2.60.0", ray-2.60.0-cp311-...whl
_RAY_PIN = re.compile(r"\bray(?:\[[\w,]*\])?(?:==|-)(\d+\.\d+\.\d+)(?:-cp(\d)(\d+))?")
_PYTHON = re.compile(r"\bpython(\d)\.(\d+)\b")


def check_image(key: str, image: str) -> Iterator[Finding]:
    """key: of the cluster file, for the message."""
    if "@sha256:" not in image:
        yield Finding(key, f"{image} has no digest: hosts may run different bytes", warning=True)
    elif set(image.rpartition("@sha256:")[2]) == {"0"}:
        yield Finding(key, "the digest is still the example's")
    found = _RAY_IMAGE.search(image)
    if found:
        yield from _compare(key, found[1], found[2], found[3])


def check_command(key: str, command: str) -> Iterator[Finding]:
    for found in _RAY_PIN.finditer(command):
        yield from _compare(key, found[1], found[2], found[3])
    for found in _PYTHON.finditer(command):
        yield from _compare(key, None, found[1], found[2])


def _compare(key: str, ray: str | None, major: str | None, minor: str | None) -> Iterator[Finding]:
    ours = version("ray")
    if ray is not None and ray != ours:
        yield Finding(key, f"names Ray {ray}, here is {ours}: Ray does not mix versions")
    python = platform.python_version()
    if major is not None and python.split(".")[:2] != [major, minor]:
        yield Finding(
            key, f"names Python {major}.{minor}, here is {python}: Ray does not mix versions"
        )
