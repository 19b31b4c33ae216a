"""Reading a checkpoint again, long after the start: are these still the same files?

Their headers were checked then. A shard replaced since would be read at the old offsets.
"""

from pathlib import Path

from expertmesh.actors.model.checkpoint import CheckpointError

Stamps = dict[str, tuple[int, int]]  # file name -> size in bytes, time of change in ns


def shard_stamps(folder: Path) -> Stamps:
    states = ((path.name, path.stat()) for path in folder.glob("*.safetensors"))
    return {name: (state.st_size, state.st_mtime_ns) for name, state in states}


def refuse_changes(folder: Path, before: Stamps) -> None:
    """Raises CheckpointError naming the first file that differs or is gone."""
    now = shard_stamps(folder)
    for name, stamp in before.items():
        if now.get(name) != stamp:
            raise CheckpointError(f"{name}: has changed on disk since this actor started")
