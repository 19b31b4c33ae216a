"""What can refuse a start for the sake of cached state: its folder, and how old tokens are read."""

import errno
import os
import shutil
import tempfile
from pathlib import Path

import torch

from expertmesh.actors.attention.contexts import near_pages
from expertmesh.actors.attention.settings import EngineSettings
from expertmesh.actors.model.config import ModelConfig
from expertmesh.actors.state.disk.seal import LEAST_BYTES
from expertmesh.actors.state.item import StateLayout
from expertmesh.actors.state.model_state import bytes_per_page, bytes_per_slot
from expertmesh.actors.state.offload.room import OffloadRoom
from expertmesh.actors.state.opening import SECRET
from expertmesh.actors.state.pages import pages_for
from expertmesh.actors.state.settings import StateSettings
from expertmesh.deploy.exit_codes import ExitCode, Refused
from expertmesh.deploy.preflight import size_text

# Of one session: at the end of its prompt, and where it stands.
SNAPSHOTS = 2


def check_state_folder(
    settings: StateSettings, config: ModelConfig, context: int, dtype: torch.dtype
) -> str:
    """What to warn of, "" if nothing. Leaves nothing behind. context: most tokens of a request.

    Refused when the folder cannot be written to, could not even hold the state of one request, or
    is to be encrypted with a secret that is too short.
    """
    folder, limit = settings.disk, settings.disk_bytes
    if folder is None or limit is None:
        return ""
    secret = os.environ.get(SECRET, "").encode()
    if 0 < len(secret) < LEAST_BYTES:
        raise Refused(
            ExitCode.USAGE,
            f"{SECRET} has {len(secret)} bytes; at least {LEAST_BYTES} are needed",
            "it encrypts --state-dir; all servers that share the folder need the same",
        )
    place = _nearest(folder)
    if not place.is_dir() or not _writable(place):
        what = "cannot be written to" if place.is_dir() else "is no folder"
        raise Refused(ExitCode.USAGE, f"--state-dir {folder}: {place} {what} here")
    one = pages_for(context) * bytes_per_page(config, dtype)
    one += SNAPSHOTS * bytes_per_slot(config, dtype)
    if limit < one:
        raise Refused(
            ExitCode.USAGE,
            f"--state-dir-gb {limit / 1e9:g}: a request of {context} tokens alone has "
            f"{size_text(one)} of state",
            "give the folder more, or lower --max-model-len",
        )
    room = shutil.disk_usage(place).free + _taken(folder)
    if room < one:
        raise Refused(
            ExitCode.USAGE,
            f"--state-dir {folder}: its disk has {size_text(room)} left, and a request of "
            f"{context} tokens alone has {size_text(one)} of state",
        )
    old = settings.offload_disk_bytes
    if room < limit + old:
        also = f" and --kv-offload-disk-gb {old / 1e9:g}" if old else ""
        return (
            f"--state-dir-gb {limit / 1e9:g}{also}: the disk of {folder} has {size_text(room)} "
            "left for it; when that is full, nothing more is stored"
        )
    return ""


def check_kv_mode(config: ModelConfig, engine: EngineSettings, dtype: torch.dtype) -> None:
    """Refused when the model has no old pages to read, the device could not even hold those that a
    long request keeps there, or neither it nor host memory the others."""
    mode, context = engine.state.kv_mode, engine.max_context or config.max_position
    if mode == "exact":
        return
    if len(config.kda_layers) == config.num_layers:
        raise Refused(ExitCode.USAGE, f"--kv-mode {mode}: this model has no MLA layers")
    near = near_pages(engine)
    if pages_for(context) > engine.pages < near:
        raise Refused(
            ExitCode.USAGE,
            f"--kv-mode {mode}: a request that is longer than --kv-pages {engine.pages} keeps "
            f"{near} pages on the device",
            f"raise --kv-pages, or lower --kv-window (now {engine.state.window_tokens} tokens)",
        )
    room = OffloadRoom(engine.state, StateLayout.of(config, dtype))
    far = room.far(mode, context)
    if pages_for(context) > engine.pages and not room.ever(far):
        disk = f" and --kv-offload-disk-gb {room.disk_capacity / 1e9:g}"
        raise Refused(
            ExitCode.USAGE,
            f"--kv-offload-gb {room.capacity / 1e9:g}{disk if room.disk_capacity else ''}: a "
            f"request of {context} tokens alone has {size_text(far.nbytes)} of old pages",
            "raise it, or lower --max-model-len",
        )


def _nearest(folder: Path) -> Path:
    """The folder, or the one of those above it that exists."""
    while not os.path.lexists(folder) and folder != folder.parent:
        folder = folder.parent
    return folder


def _writable(folder: Path) -> bool:
    """Tried with a file without a name: root may write everywhere, and yet not in /proc."""
    if not os.access(folder, os.W_OK | os.X_OK):
        return False
    try:
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        return error.errno in (errno.ENOSPC, errno.EDQUOT)  # its room is looked at next
    return True


def _taken(folder: Path) -> int:
    """Bytes of disk that files in the folder take already."""
    total = 0
    for place, _, names in os.walk(folder):
        for name in names:
            try:
                total += os.lstat(os.path.join(place, name)).st_blocks * 512
            except FileNotFoundError:
                continue  # another server's, just evicted
    return total
