"""Applying masks: the table of bytes, the tensor operations of devices, and a loop agree."""

import numpy as np
import pytest
import torch

from expertmesh.actors.attention.masks import Masks, expand, forbid
from expertmesh.actors.constraint.matcher import words_for
from expertmesh.actors.model.upload import HostUploads


@pytest.mark.parametrize("vocab", [1, 31, 32, 97, 320, 1000])
@pytest.mark.parametrize("share", [0.02, 0.5, 0.99])
def test_both_ways_forbid_what_a_loop_forbids(vocab: int, share: float) -> None:
    rng = np.random.default_rng(vocab)
    words = np.zeros((3, words_for(vocab)), dtype=np.int32)
    bits = rng.random((3, vocab)) < share
    for row, column in zip(*np.nonzero(bits), strict=True):
        words.view(np.uint32)[row, column // 32] |= np.uint32(1 << (column % 32))
    logits = torch.from_numpy(rng.standard_normal((5, vocab)).astype(np.float32))
    rows = [4, 0, 2]
    expected = logits.clone()
    for at in (0, 2):  # the second one has failed: its row is left as it is
        expected[rows[at], torch.from_numpy(~bits[at])] = -torch.inf
    bias = np.empty((3, words_for(vocab) * 32), dtype=np.float32)
    expand(words, bias)
    for ready in (bias[:, :vocab], None):
        masked = logits.clone()
        forbid(masked, Masks(rows, words, ready, {0: "failed"}), HostUploads())
        assert torch.equal(masked, expected)
