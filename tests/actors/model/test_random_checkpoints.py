"""The random checkpoints that other tests stand on: repeatable, well scaled, one model per seed."""

from pathlib import Path
from typing import Any

import pytest
import torch

from expertmesh.actors.model.checkpoint import Checkpoint
from expertmesh.actors.model.config import load_config
from expertmesh.actors.model.tokenizer import Tokenizer
from tests.support.checkpoints import write_checkpoint
from tests.support.runner import Runner
from tests.support.tampering import shards_of


def weights(folder: Path) -> dict[str, torch.Tensor]:
    checkpoint = Checkpoint.open(folder, load_config(folder))
    return {name: checkpoint.tensor(name) for name in checkpoint.names_for_attention()}


@pytest.mark.parametrize("shards", [1, 2, 5])
def test_the_number_of_shards_changes_no_weight(tmp_path: Path, shards: int) -> None:
    folder = write_checkpoint(tmp_path / "a", shards=shards)
    assert len(shards_of(folder)) == shards
    a, b = weights(folder), weights(write_checkpoint(tmp_path / "b", shards=3))
    assert all(torch.equal(a[name], b[name]) for name in a)


def test_another_seed_is_another_model(tmp_path: Path) -> None:
    a = weights(write_checkpoint(tmp_path / "a"))
    b = weights(write_checkpoint(tmp_path / "b", seed=1))
    assert not any(torch.equal(a[name], b[name]) for name in a)


def test_the_tokenizer_fits_the_model(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path, tokenizer=True)
    config = load_config(folder)
    tokenizer = Tokenizer.load(folder, config)
    assert tokenizer is not None
    assert tokenizer.decode(tokenizer.encode("héllo 漢字")) == "héllo 漢字"
    assert config.vocab_size == 512
    assert config.eos == (258,)


@pytest.mark.parametrize(
    "keys",
    [{}, {"family": "kimi_linear"}, {"num_hidden_layers": 12, "attn_res_block_size": 4},
     {"experts": "mixed", "num_experts": 7, "num_experts_per_token": 3, "vocab_size": 333}],
)  # fmt: skip
def test_logits_are_well_scaled_and_greedy_text_does_not_loop(
    tmp_path: Path, keys: dict[str, Any]
) -> None:
    runner = Runner(write_checkpoint(tmp_path, **keys))
    ids = [int(i) for i in torch.randint(0, 320, (40,), generator=torch.Generator().manual_seed(3))]
    logits_TV = runner.prefill(0, ids)
    assert 0.7 < float(logits_TV.std()) < 1.4
    assert len(set(runner.greedy(0, logits_TV[-1], 24))) > 12


def test_packed_and_bf16_experts_give_the_same_logits(tmp_path: Path) -> None:
    ids = list(range(1, 30))
    packed, plain = (
        Runner(write_checkpoint(tmp_path / kind, experts=kind)).prefill(0, ids)
        for kind in ("packed", "bf16")
    )
    assert torch.equal(packed, plain)
