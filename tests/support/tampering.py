"""Ways to break a checkpoint folder, for the tests of what must be refused."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file
from torch import Tensor

INDEX = "model.safetensors.index.json"
Change = Callable[[dict[str, Tensor]], None]


def shards_of(folder: Path) -> list[Path]:
    """The shard files, in order."""
    return sorted(folder.glob("model*.safetensors"))


def shard_with(folder: Path, name: str) -> Path:
    """The shard that the index names for the tensor whose full name is or ends with `name`."""
    weight_map = read_json(folder / INDEX)["weight_map"]
    return folder / next(file for full, file in weight_map.items() if full.endswith(name))


def change_tensors(folder: Path, change: Change) -> None:
    """Apply `change` to the tensors (full names) of each shard; the index follows."""
    weight_map = {}
    for path in shards_of(folder):
        tensors = load_file(path)
        change(tensors)
        save_file({name: t.contiguous() for name, t in tensors.items()}, path, {"format": "pt"})
        weight_map |= dict.fromkeys(tensors, path.name)
    if (folder / INDEX).exists():
        (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def replace(ending: str, make: Callable[[Tensor], Tensor | None]) -> Change:
    """A change of the one tensor whose name ends with `ending`; None drops it."""

    def change(tensors: dict[str, Tensor]) -> None:
        for name in [name for name in tensors if name.endswith(ending)]:
            made = make(tensors.pop(name))
            if made is not None:
                tensors[name] = made

    return change


def change_json(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Edit a JSON file in place."""
    content = read_json(path)
    change(content)
    path.write_text(json.dumps(content))


def read_json(path: Path) -> dict[str, Any]:
    """The parsed object."""
    parsed: dict[str, Any] = json.loads(path.read_text())
    return parsed
