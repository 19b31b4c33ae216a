"""A tiny model that reads the bundled model's tokens: a question is as few steps as there."""

import shutil
from pathlib import Path

from tests.support.checkpoints import write_checkpoint

NANO = Path(__file__).resolve().parents[2] / "deploy" / "models" / "nano"


def write_wordy(folder: Path) -> Path:
    """A random checkpoint of four layers and its folder."""
    write_checkpoint(
        folder, num_hidden_layers=4, vocab_size=2048,
        bos_token_id=1984, eos_token_id=1986, pad_token_id=2047,
    )  # fmt: skip
    for name in ("tiktoken.model", "tokenizer_config.json"):
        shutil.copy(NANO / name, folder / name)
    return folder
