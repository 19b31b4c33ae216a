"""Words come back bit for bit; what is not a blob is refused."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from expertmesh.actors.state.codec import planes
from expertmesh.actors.state.codec.packed import BadPayload

KINDS = (np.uint8, np.uint16, np.uint32)


def back(words: planes.Words, blob: bytes, signed: bool = True) -> planes.Words:
    out = np.full_like(words, 0x5A)
    planes.decode(memoryview(blob), out, signed=signed)
    return out


@given(st.data())
@pytest.mark.parametrize("kind", KINDS)
def test_any_words_come_back(kind: type, data: st.DataObject) -> None:
    most = int(np.iinfo(kind).max)
    few = st.sampled_from([0, 1, most, most >> 1, (most >> 1) + 1])
    values = data.draw(st.lists(few | st.integers(0, most), min_size=1, max_size=300))
    words = np.tile(np.array(values, kind), data.draw(st.sampled_from([1, 40])))
    signed = data.draw(st.booleans())
    blob = planes.encode(words, signed=signed)
    assert len(blob) <= words.nbytes + 4
    assert np.array_equal(back(words, blob, signed), words)


@pytest.mark.parametrize(("kind", "at_least"), [(np.uint16, 1.45), (np.uint32, 1.18)])
def test_exponents_of_gaussian_values_shrink(kind: type, at_least: float) -> None:
    dtype = torch.bfloat16 if kind is np.uint16 else torch.float32
    values = torch.randn(36_864, generator=torch.Generator().manual_seed(2)).to(dtype)
    words = values.view(torch.int16 if kind is np.uint16 else torch.int32).numpy().view(kind)
    assert words.nbytes / len(planes.encode(words)) > at_least


def test_floats_widened_from_bf16_shrink_as_if_they_were_not() -> None:
    values = torch.randn(36_864, generator=torch.Generator().manual_seed(2)).bfloat16().float()
    words = values.view(torch.int32).numpy().view(np.uint32)
    assert words.nbytes / len(planes.encode(words)) > 2 * 1.44


def test_noise_is_kept_as_it_is() -> None:
    words = np.random.default_rng(3).integers(0, 1 << 32, 20_000, np.uint32)
    blob = planes.encode(words)
    assert len(blob) == words.nbytes + 4
    assert np.array_equal(back(words, blob), words)


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_no_blob_of_so_many_words_is_refused(kind: type) -> None:
    words = np.zeros(5_000, kind)
    blob = planes.encode(words)
    out = np.empty_like(words)
    wrong = [b"", b"\1\0\0", blob[:-1], blob[:3], blob[:-2] + b"\xff\xff", b"\xff" * 4 + b"short"]
    wrong.append(b"\xff" * 4 + b"1")
    for bad in wrong:
        with pytest.raises(BadPayload):
            planes.decode(memoryview(bad), out)
    for count in (4_999, 5_001):
        with pytest.raises(BadPayload):
            planes.decode(memoryview(blob), np.empty(count, kind))
