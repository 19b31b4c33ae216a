"""The files of a checkpoint folder: the index, the shards it names, and that the two agree.

An index and files that do not belong together (renamed, re-sharded, half downloaded) would load a
partial or wrong model; every disagreement is refused with names (C4).
"""

import logging
from collections.abc import Iterable
from pathlib import Path

import msgspec

from expertmesh.actors.model.shard import CheckpointError, Shard, read_shard

_log = logging.getLogger(__name__)

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"
_SHOWN = 10


def shorten(lines: Iterable[str]) -> str:
    """The first ten, then how many more."""
    listed = list(lines)
    more = len(listed) - _SHOWN
    return "; ".join(listed[:_SHOWN]) + (f"; and {more} more" if more > 0 else "")


def open_shards(folder: Path) -> list[Shard]:
    """All shards of `folder`, headers read and checked, in the order of their names.

    A folder has an index and the shards it names, or one `model.safetensors`. Raises
    CheckpointError naming the files or tensors that disagree.
    """
    if not folder.is_dir():
        raise CheckpointError(f"{folder}: no such folder")
    index_path = folder / INDEX_NAME
    if not index_path.exists():
        if not (folder / SINGLE_NAME).exists():
            raise CheckpointError(f"{folder}: neither {INDEX_NAME} nor {SINGLE_NAME} is there")
        _refuse_unnamed_files(folder, {SINGLE_NAME})
        return [read_shard(folder / SINGLE_NAME)]

    weight_map, total_size = read_index(index_path)
    files = sorted(set(weight_map.values()))
    absent = [name for name in files if not (folder / name).exists()]
    if absent:
        raise CheckpointError(
            f"{INDEX_NAME}: index does not match files: of the {len(files)} shards it names, "
            f"not there: {shorten(absent)}"
        )
    _refuse_unnamed_files(folder, set(files))
    shards = [read_shard(folder / name) for name in files]
    _refuse_disagreement(weight_map, shards)
    found_size = sum(entry.nbytes for shard in shards for entry in shard.entries.values())
    if total_size is not None and total_size != found_size:
        # Converters fill this field by several rules, so it decides nothing.
        _log.warning("%s: total_size %d, tensors hold %d", INDEX_NAME, total_size, found_size)
    return shards


def read_index(path: Path) -> tuple[dict[str, str], int | None]:
    """(tensor name -> shard file name, metadata.total_size) of an index file."""
    try:
        raw = msgspec.json.decode(path.read_bytes())
    except OSError as error:
        raise CheckpointError(f"{path.name}: cannot be read ({error.strerror})") from error
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise CheckpointError(f"{path.name}: not valid JSON ({str(error)[:200]})") from None
    weight_map = raw.get("weight_map") if isinstance(raw, dict) else None
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{path.name}: has no weight_map with tensors in it")
    for file in set(map(str, weight_map.values())):
        # Plain names only: an index must not be able to point outside its folder.
        plain = file == Path(file).name and "\\" not in file and file.endswith(".safetensors")
        if not plain:
            name = next(n for n, f in weight_map.items() if str(f) == file)
            raise CheckpointError(
                f"{path.name}: tensor {name}: {file!r} is not the plain name of a .safetensors file"
            )
    metadata = raw.get("metadata")
    total = metadata.get("total_size") if isinstance(metadata, dict) else None
    return weight_map, total if isinstance(total, int) else None


def _refuse_unnamed_files(folder: Path, named: set[str]) -> None:
    """Shards that nothing names are the other half of a stale index."""
    found = {path.name for path in folder.glob("*.safetensors")} - named
    shards = sorted(name for name in found if name.startswith("model"))
    if shards:
        raise CheckpointError(
            f"{INDEX_NAME}: index does not match files: not named by it: {shorten(shards)}"
        )
    if found:
        _log.info("%s: files that are no shard ignored: %s", folder, shorten(sorted(found)))


def _refuse_disagreement(weight_map: dict[str, str], shards: list[Shard]) -> None:
    """Every tensor is in exactly the shard that the index says, and in no other."""
    holder: dict[str, str] = {}
    problems = []
    for shard in shards:
        file = shard.path.name
        for name in shard.entries:
            if name in holder:
                problems.append(f"tensor {name} is in both {holder[name]} and {file}")
            elif weight_map.get(name) not in (None, file):
                problems.append(f"tensor {name} is in {file}, the index says {weight_map[name]}")
            elif name not in weight_map:
                problems.append(f"tensor {name} of {file} is not in the index")
            holder[name] = file
    problems += [
        f"tensor {name} is not in {file}" for name, file in weight_map.items() if name not in holder
    ]
    if problems:
        raise CheckpointError(f"{INDEX_NAME}: index does not match files: {shorten(problems)}")
