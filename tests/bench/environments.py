"""The peers' own environments, made by the benchmark on first use and kept: never dependencies.

Versions are pinned to those whose agreement with the specification was checked.
"""

import os
import shutil
import subprocess
import sys
import tarfile
from dataclasses import dataclass, field
from pathlib import Path

from tests.bench.models import cache_folder


@dataclass(frozen=True)
class Peer:
    """built: distributions that are compiled here from their source archive, for this CPU."""

    name: str
    requirements: tuple[str, ...]
    built: tuple[str, ...] = ()
    sources: tuple[str, ...] = field(default=())  # folders to keep from the source archive


MLX = Peer("mlx", ("mlx==0.32.4", "mlx-cpu==0.32.4", "mlx-lm==0.32.2"))
LLAMACPP = Peer(
    "llamacpp", (), ("llama-cpp-python==0.3.36",),
    tuple(f"vendor/llama.cpp/{part}" for part in ("conversion", "gguf-py", "models/templates")),
)  # fmt: skip
# Also runs llama.cpp's converter, which needs torch.
TRANSFORMERS = Peer("transformers", ("torch==2.13.0", "transformers==5.24.0"))


def folder_of(peer: Peer) -> Path:
    return cache_folder() / f"bench-{peer.name}"


def python_of(peer: Peer) -> str:
    """The interpreter of the peer's environment; makes the environment when it is not there.

    Building llama-cpp-python takes five minutes on two cores. Raises CalledProcessError.
    """
    folder = folder_of(peer)
    python = folder / "bin" / "python"
    ready = folder / ".ready"
    wanted = "\n".join([*peer.requirements, *peer.built])
    if ready.exists() and ready.read_text() == wanted:
        return str(python)
    print(f"making {folder} ({wanted.replace(chr(10), ', ')})", file=sys.stderr)
    shutil.rmtree(folder, ignore_errors=True)
    _run(sys.executable, "-m", "venv", str(folder))
    if peer.requirements:
        _run(str(python), "-m", "pip", "install", "--quiet", *peer.requirements)
    for distribution in peer.built:
        _build(python, distribution, folder, peer.sources)
    ready.write_text(wanted)
    return str(python)


def _build(python: Path, distribution: str, folder: Path, sources: tuple[str, ...]) -> None:
    archives = folder / "archives"
    name = distribution.partition("==")[0]
    pip = [str(python), "-m", "pip"]
    _run(*pip, "download", "--quiet", "--no-deps", "--no-binary", name, "-d", str(archives),
         distribution)  # fmt: skip
    (archive,) = archives.glob("*.tar.gz")
    with tarfile.open(archive) as content:
        top = content.getnames()[0].partition("/")[0]
        wanted = tuple(f"{top}/{source}" for source in sources)
        members = [member for member in content if member.name.startswith(wanted)]
        content.extractall(archives, members, filter="data")
    (archives / top).rename(folder / "source")
    # A build takes every core: others on the machine come first. Its image and audio parts, half of
    # the build, are not needed here.
    environment = os.environ | {"CMAKE_ARGS": "-DLLAVA_BUILD=OFF"}
    _run("nice", "-n", "15", *pip, "install", "--quiet", str(archive), environment=environment)


def _run(*command: str, environment: dict[str, str] | None = None) -> None:
    subprocess.run(command, check=True, stdout=sys.stderr, env=environment)
