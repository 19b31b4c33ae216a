"""A layer of many items at once is what it is of each alone, and nothing is written beside it."""

import random
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor

from expertmesh.actors.state.codec import pack as packing
from expertmesh.actors.state.codec import planes
from expertmesh.actors.state.codec.pack import pack, unpack_layer, unpack_layers
from expertmesh.actors.state.codec.packed import BadPayload, Packed
from expertmesh.actors.state.item import Header, Item, Kind
from expertmesh.actors.state.settings import Codec

DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.uint8)
HEADER = Header(b"k" * 32, Kind.PAGE, b"p" * 32, 64, (1, 2), "prefill", b"l")
POISON = 0x5A


def values(count: int, shape: tuple[int, ...], dtype: torch.dtype, seed: int = 1) -> list[Tensor]:
    """Pages of which some are noise, which cannot be packed, and some all zeros."""
    generator = torch.Generator().manual_seed(seed)
    found = []
    for at in range(count):
        x = torch.randn(shape, generator=generator)
        page = (x * 5).to(dtype) if dtype is not torch.uint8 else (x * 5 + 100).to(dtype)
        if at % 5 == 3:
            noise = torch.randint(0, 256, page.view(torch.uint8).shape, generator=generator)
            page = noise.to(torch.uint8).view(dtype)
        found.append(torch.zeros_like(page) if at % 7 == 4 else page)
    return found


def packed(pages: Sequence[Tensor], codec: Codec) -> list[Packed]:
    return [pack(Item(HEADER, (page,)), codec) for page in pages]


def poisoned(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.full((*shape, dtype.itemsize), POISON, dtype=torch.uint8).view(dtype)[..., 0]


def bits(x: Tensor) -> Tensor:
    return x.contiguous().view(torch.uint8)


def places(count: int, of: int, seed: int = 3) -> list[int]:
    return random.Random(seed).sample(range(of), count)


def check(out: Tensor, rows: Sequence[int], wanted: Sequence[Tensor]) -> None:
    expected = poisoned(*out.shape, dtype=out.dtype)
    for row, layer in zip(rows, wanted, strict=True):
        expected[row] = layer
    assert torch.equal(bits(out), bits(expected))


@pytest.mark.parametrize("codec", ["raw", "lossless"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("count", "rows", "width"), [(120, 64, 20), (9, 64, 576), (3, 64, 1100), (1, 1, 1)]
)
def test_all_come_back(codec: Codec, dtype: torch.dtype, count: int, rows: int, width: int) -> None:
    """More small ones than are unpacked together, one at a time, and one in pieces."""
    assert 120 * 64 * 20 > 2 * planes._PIECE > 64 * 1100 > planes._PIECE > 64 * 576
    pages, where = values(count, (2, rows, width), dtype), places(count, count + 4)
    items = packed(pages, codec)
    for layer in range(2):
        out = poisoned(count + 4, rows, width, dtype=dtype)
        unpack_layers(items, 0, layer, out, where)
        check(out, where, [page[layer] for page in pages])


@pytest.mark.parametrize("dtype", DTYPES[:3])
@pytest.mark.parametrize("strided", [False, True])
def test_items_of_all_codecs_come_back_together(
    dtype: torch.dtype, strided: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packing, "_STAGED", 3 * 64 * 40 * dtype.itemsize)
    pages = values(40, (2, 64, 40), dtype)
    kinds: list[Codec] = ["raw", "lossless", "lossless", "lossless", "int8", "int4", "int8"]
    items, wanted = list[Packed](), list[Tensor]()
    for at, page in enumerate(pages):
        item = packed([page], kinds[at % len(kinds)])[0]
        if at % len(kinds) == 6:  # an estimate
            item = item.base()
            page = poisoned(2, 64, 40, dtype=dtype)
            unpack_layer(item, 0, 1, page[1])
        items.append(Packed.parse(b"".join(item.buffers())))
        wanted.append(page[1])
    where = places(40, 50)
    out = poisoned(50, 64, 80, dtype=dtype)[:, :, ::2] if strided else None
    out = poisoned(50, 64, 40, dtype=dtype) if out is None else out
    unpack_layers(items, 0, 1, out, where)
    check(out, where, wanted)


def test_the_second_part_of_snapshots_comes_back() -> None:
    generator = torch.Generator().manual_seed(2)
    kda = [torch.randn(3, 2, 8, 8, generator=generator) for _ in range(5)]
    conv = [torch.randn(3, 3, 48, generator=generator).bfloat16() for _ in range(5)]
    items = [pack(Item(HEADER, parts), "lossless") for parts in zip(kda, conv, strict=True)]
    for part, tensors in enumerate((kda, conv)):
        out = poisoned(5, *tensors[0].shape[1:], dtype=tensors[0].dtype)
        unpack_layers(items, part, 2, out, [4, 3, 2, 1, 0])
        check(out, [4, 3, 2, 1, 0], [tensor[2] for tensor in tensors])


def test_nothing_is_written_for_no_items_and_to_no_rows() -> None:
    out = poisoned(2, 64, 20, dtype=torch.bfloat16)
    unpack_layers([], 0, 0, out, [])
    check(out, [], [])
    items = packed(values(2, (2, 64, 20), torch.bfloat16), "lossless")
    with pytest.raises(IndexError):
        unpack_layers(items, 0, 0, out, [0, 2])
    with pytest.raises(ValueError, match="2 items into 1 rows"):
        unpack_layers(items, 0, 0, out, [0])


@pytest.mark.parametrize("codec", ["raw", "lossless", "int8"])
def test_other_shapes_and_layers_are_refused(codec: Codec) -> None:
    items = packed(values(2, (2, 64, 20), torch.bfloat16), codec)
    outs = [poisoned(2, 64, 21, dtype=torch.bfloat16), poisoned(2, 64, 20, dtype=torch.float16)]
    outs += [poisoned(2, 1280, dtype=torch.bfloat16)]
    for out in [*outs, poisoned(2, 64, 21, dtype=torch.bfloat16).transpose(1, 2)]:
        with pytest.raises(ValueError, match="into"):
            unpack_layers(items, 0, 0, out, [0, 1])
        check(out, [], [])
    for layer in (-1, 2):
        with pytest.raises(IndexError):
            unpack_layers(items, 0, layer, poisoned(2, 64, 20, dtype=torch.bfloat16), [0, 1])
    other = packed(values(1, (2, 64, 24), torch.bfloat16), codec)
    with pytest.raises(ValueError, match="into"):
        unpack_layers([*items, *other], 0, 0, poisoned(3, 64, 20, dtype=torch.bfloat16), [0, 1, 2])


@pytest.mark.parametrize(
    ("codec", "dtype"), [("raw", torch.bfloat16), *(("lossless", dtype) for dtype in DTYPES)]
)
def test_damage_to_one_is_found_or_stays_in_its_row(codec: Codec, dtype: torch.dtype) -> None:
    """Whatever is wrong with it, wherever it is among others."""
    pages = values(20, (2, 64, 20), dtype)
    written = [b"".join(item.buffers()) for item in packed(pages, codec)]
    rng, refused = random.Random(4), 0
    for _ in range(100):
        at, data = rng.randrange(20), [*written]
        bad = bytearray(data[at])
        for _ in range(rng.randint(1, 8)):
            bad[rng.randrange(len(bad))] ^= 1 << rng.randrange(8)
        data[at] = bytes(bad)
        out, where = poisoned(24, 64, 20, dtype=dtype), places(20, 24, rng.randrange(99))
        try:
            items = [Packed.parse(one, [((2, 64, 20), dtype)]) for one in data]
            unpack_layers(items, 0, 1, out, where)
        except BadPayload:
            refused += 1
            continue
        wanted = [page[1] for page in pages]
        wanted[at] = out[where[at]].clone()
        check(out, where, wanted)
    assert refused


@pytest.mark.parametrize("codec", ["raw", "lossless"])
def test_a_blob_of_another_length_is_refused(codec: Codec) -> None:
    """Among others, none of which would have missed its bytes."""
    pages = values(6, (2, 64, 20), torch.bfloat16)
    right = packed(pages, codec)
    blobs = [right[2].blob(0, 0), right[2].blob(0, 1)]
    for wrong in (b"", blobs[1][:-1], bytes(blobs[1]) + b"x", b"\xff" * 5, blobs[1][:4]):
        items = [*right]
        items[2] = Packed.of(right[2].parts, [blobs[0], wrong], ())
        with pytest.raises(BadPayload):
            unpack_layers(items, 0, 1, poisoned(6, 64, 20, dtype=torch.bfloat16), range(6))


def test_threads_do_not_share_what_they_work_in() -> None:
    pages = values(30, (2, 64, 20), torch.float32)
    items = packed(pages, "lossless")

    def one(seed: int) -> None:
        out, where = poisoned(33, 64, 20, dtype=torch.float32), places(30, 33, seed)
        unpack_layers(items, 0, seed % 2, out, where)
        check(out, where, [page[seed % 2] for page in pages])

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(one, range(40)))
