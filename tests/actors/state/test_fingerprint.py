"""A model's state is told apart from another's by what decides about its bits, and no more."""

import json
from pathlib import Path

import pytest

from expertmesh.actors.model.loading import LoadSettings
from expertmesh.actors.state import fingerprint as module
from tests.support.checkpoints import write_checkpoint


def of(folder: Path, **settings: object) -> bytes:
    load = LoadSettings(model=folder, **settings)  # type: ignore[arg-type]
    opened = load.open()
    opened.source.close()
    return module.fingerprint(opened, load)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("model"), num_hidden_layers=4)


def copy_of(folder: Path, to: Path) -> Path:
    for path in folder.iterdir():
        (to / path.name).write_bytes(path.read_bytes())
    return to


def test_a_copy_elsewhere_is_the_same_model(checkpoint: Path, tmp_path: Path) -> None:
    assert of(copy_of(checkpoint, tmp_path)) == of(checkpoint)
    # How it is read, and what is kept of it, changes no bit.
    assert of(checkpoint, read_mode="sequential", expert_cache_bytes=0) == of(checkpoint)


def test_dtype_and_kernels_are_part_of_it(checkpoint: Path) -> None:
    prints = {
        of(checkpoint), of(checkpoint, dtype="bfloat16"), of(checkpoint, kernels="reference"),
        of(checkpoint, kernels="auto,sample=reference"),
    }  # fmt: skip
    assert len(prints) == 4


@pytest.mark.parametrize("whole", [True, False])
def test_one_changed_byte_of_the_weights_tells(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, whole: bool
) -> None:
    """Of large files a sample is read; the last byte is in it."""
    if not whole:
        monkeypatch.setattr(module, "WHOLE_BYTES", 4096)
    before = of(checkpoint)
    shard = next(copy_of(checkpoint, tmp_path).glob("*.safetensors"))
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    shard.write_bytes(data)
    assert of(tmp_path) != before


def test_another_tokenizer_is_another_model(checkpoint: Path, tmp_path: Path) -> None:
    copy_of(checkpoint, tmp_path)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"added": 1}))
    assert of(tmp_path) != of(checkpoint)
