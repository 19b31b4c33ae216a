"""The files of a checkpoint folder: the index, the shards it names, and that the two agree.

An index and files that do not belong together (renamed, re-sharded, half downloaded) would load a
partial or wrong model; every disagreement is refused with names (C4).
"""

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from expertmesh.actors.model.problems import CheckpointError, Problem
from expertmesh.actors.model.shard import Shard, read_shard

_log = logging.getLogger(__name__)

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"
_SHOWN = 10


def shorten(lines: Iterable[str]) -> str:
    """The first ten, then how many more."""
    listed = list(lines)
    more = len(listed) - _SHOWN
    return "; ".join(listed[:_SHOWN]) + (f"; and {more} more" if more > 0 else "")


@dataclass(slots=True)
class FolderSurvey:
    """What a folder holds and everything that is wrong with it, where `open_shards` stops at the
    first thing. unreadable: shards that are named but not there or broken."""

    shards: list[Shard] = field(default_factory=list)
    weight_map: dict[str, str] = field(default_factory=dict)
    unreadable: set[str] = field(default_factory=set)
    problems: list[Problem] = field(default_factory=list)
    warnings: list[Problem] = field(default_factory=list)


def open_shards(folder: Path) -> list[Shard]:
    """All shards of `folder`, headers read and checked, in the order of their names.

    A folder has an index and the shards it names, or one `model.safetensors`. Raises
    CheckpointError naming the files or tensors that disagree.
    """
    weight_map, total_size = _named_files(folder)
    files = sorted(set(weight_map.values()))
    absent = _absent(folder, files)
    if absent:
        raise CheckpointError(
            f"{INDEX_NAME}: index does not match files: of the {len(files)} shards it names, "
            f"not there: {shorten(problem.file for problem in absent)}"
        )
    unnamed, others = _unnamed(folder, set(files))
    if unnamed:
        raise CheckpointError(
            f"{INDEX_NAME}: index does not match files: not named by it: "
            f"{shorten(problem.file for problem in unnamed)}"
        )
    if others:
        _log.info("%s: files that are no shard ignored: %s", folder, shorten(others))
    shards = [read_shard(folder / name) for name in files]
    if not is_indexed(folder):
        return shards
    disagree = _disagreements(weight_map, shards)
    if disagree:
        told = shorten(problem.text for problem in disagree)
        raise CheckpointError(f"{INDEX_NAME}: index does not match files: {told}")
    for problem in _size_differs(total_size, shards):
        _log.warning("%s", problem.text)
    return shards


def survey_folder(folder: Path) -> FolderSurvey:
    """As `open_shards`, going on after each problem. Raises CheckpointError only where nothing
    says which files belong to the model."""
    survey = FolderSurvey()
    survey.weight_map, total_size = _named_files(folder)
    files = sorted(set(survey.weight_map.values()))
    absent = _absent(folder, files)
    survey.problems += absent + _unnamed(folder, set(files))[0]
    survey.unreadable = {problem.file for problem in absent}
    for name in files:
        if name in survey.unreadable:
            continue
        try:
            survey.shards.append(read_shard(folder / name))
        except CheckpointError as error:
            survey.problems.append(error.problem)
            survey.unreadable.add(name)
    if is_indexed(folder):
        survey.problems += _disagreements(survey.weight_map, survey.shards, survey.unreadable)
        if not survey.unreadable:
            survey.warnings = _size_differs(total_size, survey.shards)
    return survey


def is_indexed(folder: Path) -> bool:
    return (folder / INDEX_NAME).exists()


def _named_files(folder: Path) -> tuple[dict[str, str], int | None]:
    """The index's weight_map and total_size; a lone `model.safetensors` is named by nothing."""
    if not folder.is_dir():
        raise CheckpointError(f"{folder}: no such folder")
    if is_indexed(folder):
        return read_index(folder / INDEX_NAME)
    if not (folder / SINGLE_NAME).exists():
        raise CheckpointError(f"{folder}: neither {INDEX_NAME} nor {SINGLE_NAME} is there")
    return {"": SINGLE_NAME}, None


def read_index(path: Path) -> tuple[dict[str, str], int | None]:
    """(tensor name -> shard file name, metadata.total_size) of an index file."""
    try:
        raw = msgspec.json.decode(path.read_bytes())
    except OSError as error:
        raise CheckpointError(
            f"{path.name}: cannot be read ({error.strerror})", file=path.name
        ) from error
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise CheckpointError(
            f"{path.name}: not valid JSON ({str(error)[:200]})", file=path.name
        ) from None
    weight_map = raw.get("weight_map") if isinstance(raw, dict) else None
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{path.name}: has no weight_map with tensors in it", file=path.name)
    for file in set(map(str, weight_map.values())):
        # Plain names only: an index must not be able to point outside its folder.
        plain = file == Path(file).name and "\\" not in file and file.endswith(".safetensors")
        if not plain:
            name = next(n for n, f in weight_map.items() if str(f) == file)
            raise CheckpointError(
                f"{path.name}: tensor {name}: {file!r} is not the plain name of a .safetensors "
                "file",
                file=path.name,
                tensor=str(name),
                expected="the plain name of a .safetensors file",
                found=repr(file),
            )
    metadata = raw.get("metadata")
    total = metadata.get("total_size") if isinstance(metadata, dict) else None
    return weight_map, total if isinstance(total, int) else None


def _absent(folder: Path, files: Sequence[str]) -> list[Problem]:
    return [
        Problem(f"{name}: named by the index, not there", name, "", "a file", "nothing")
        for name in files
        if not (folder / name).is_file()
    ]


def _unnamed(folder: Path, named: set[str]) -> tuple[list[Problem], list[str]]:
    """Shards that nothing names, the other half of a stale index; and files that are no shard."""
    found = sorted({path.name for path in folder.glob("*.safetensors")} - named)
    shards = [name for name in found if name.startswith("model")]
    told = "is there, not named by the index"
    return [Problem(f"{name}: {told}", name) for name in shards], [
        name for name in found if name not in shards
    ]


def _disagreements(
    weight_map: Mapping[str, str], shards: Sequence[Shard], unreadable: Iterable[str] = ()
) -> list[Problem]:
    """Every tensor is in exactly the shard that the index says, and in no other. What is in an
    unreadable shard is not known."""
    holder: dict[str, str] = {}
    problems = []

    def wrong(text: str, name: str, found: str) -> None:
        file = weight_map.get(name, "")
        expected = f"in {file}" if file else "in the index"
        problems.append(Problem(text, file or found, name, expected, found))

    for shard in shards:
        file = shard.path.name
        for name in shard.entries:
            if name in holder:
                text = f"tensor {name} is in both {holder[name]} and {file}"
                wrong(text, name, f"in {holder[name]} and {file}")
            elif weight_map.get(name) not in (None, file):
                text = f"tensor {name} is in {file}, the index says {weight_map[name]}"
                wrong(text, name, f"in {file}")
            elif name not in weight_map:
                problems.append(
                    Problem(
                        f"tensor {name} of {file} is not in the index",
                        file,
                        name,
                        "in the index",
                        "not there",
                    )
                )
            holder[name] = file
    unknown = set(unreadable)
    for name, file in weight_map.items():
        if name not in holder and file not in unknown:
            wrong(f"tensor {name} is not in {file}", name, "not there")
    return problems


def _size_differs(total_size: int | None, shards: Sequence[Shard]) -> list[Problem]:
    """Converters fill the index's total_size by several rules, so it decides nothing."""
    found = sum(entry.nbytes for shard in shards for entry in shard.entries.values())
    if total_size is None or total_size == found:
        return []
    text = f"{INDEX_NAME}: total_size {total_size}, tensors hold {found}"
    return [Problem(text, INDEX_NAME, "", f"{total_size} bytes", f"{found} bytes")]
