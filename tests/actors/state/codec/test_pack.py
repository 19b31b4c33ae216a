"""Items come back bit for bit, layer by layer, whatever is in them."""

import random
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor

from expertmesh.actors.state.codec import planes
from expertmesh.actors.state.codec.pack import open_rows, pack, unpack, unpack_layer
from expertmesh.actors.state.codec.packed import BadPayload, Packed
from expertmesh.actors.state.item import Header, Item, Kind
from expertmesh.actors.state.settings import Codec

CODECS: tuple[Codec, ...] = ("raw", "lossless", "int8", "int4")
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def item(kind: Kind, *parts: Tensor) -> Item:
    return Item(Header(b"k" * 32, kind, b"p" * 32, 64, (1, 2), "prefill", b"l"), parts)


def same(left: Tensor, right: Tensor) -> bool:
    return left.dtype == right.dtype and torch.equal(bits(left), bits(right))


def bits(x: Tensor) -> Tensor:
    return x.contiguous().view(torch.uint8)


def page(dtype: torch.dtype, width: int = 40, layers: int = 2, rows: int = 64) -> Tensor:
    return torch.randn(layers, rows, width, generator=torch.Generator().manual_seed(1)).to(dtype)


def odd_page(dtype: torch.dtype) -> Tensor:
    """Zeros of both signs, rows of zeros, tiny and huge values, infinities and NaNs with bits."""
    x = page(dtype)
    info = torch.finfo(dtype)
    values = [0.0, -0.0, info.tiny, -info.smallest_normal / 4, info.max, info.min]
    x[0, 0, :6] = torch.tensor(values, dtype=torch.float64).to(dtype)
    x[0, 1], x[0, 2] = 0.0, -0.0
    x[0, 3, 0], x[0, 4, 1], x[0, 5, 2] = torch.inf, -torch.inf, torch.nan
    words = x.view(torch.int16 if dtype.itemsize == 2 else torch.int32)
    words[0, 6, 3] = words[0, 5, 2] | 5 | torch.iinfo(words.dtype).min
    x[1] *= 1e-3
    return x


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: str(d)[6:])
@pytest.mark.parametrize("make", [page, odd_page], ids=["plain", "odd"])
def test_page_survives_memory_and_disk(codec: Codec, dtype: torch.dtype, make) -> None:  # type: ignore[no-untyped-def]
    latents = make(dtype)
    packed = pack(item(Kind.PAGE, latents), codec)
    read = Packed.parse(b"".join(packed.buffers()), [(tuple(latents.shape), dtype)])
    assert packed.exact and read.exact and read.codec == packed.codec == codec
    assert same(unpack(packed)[0], latents) and same(unpack(read)[0], latents)


@pytest.mark.parametrize("codec", CODECS)
def test_sizes_are_those_of_the_bytes(codec: Codec) -> None:
    packed = pack(item(Kind.PAGE, page(torch.bfloat16, 128)), codec)
    written = b"".join(packed.buffers())
    assert packed.nbytes == len(written) == Packed.parse(written).nbytes
    assert packed.raw_bytes == 2 * 64 * 128 * 2
    assert packed.base().nbytes == sum(map(len, packed.base().buffers())) <= packed.nbytes


@pytest.mark.parametrize("codec", CODECS)
def test_snapshots_and_sessions_are_never_lossy(codec: Codec) -> None:
    kda, conv = torch.randn(3, 2, 8, 8), torch.randn(3, 3, 48).bfloat16()
    snapshot = pack(item(Kind.SNAPSHOT, kda, conv), codec)
    session = pack(item(Kind.SESSION, torch.arange(300).to(torch.uint8)), codec)
    assert snapshot.base() is snapshot and snapshot.exact and session.exact
    assert all(map(same, unpack(snapshot), (kda, conv)))
    assert same(unpack(session)[0], torch.arange(300).to(torch.uint8))


@pytest.mark.parametrize(("codec", "most"), [("int8", 0.012), ("int4", 0.15)])
def test_a_base_alone_is_close_and_says_that_it_is_not_exact(codec: Codec, most: float) -> None:
    latents = page(torch.bfloat16, 128)
    latents[:, :, 5] *= 30  # a channel that sticks out
    packed = pack(item(Kind.PAGE, latents), codec).base()
    read = Packed.parse(b"".join(packed.buffers()))
    assert not packed.exact and not read.exact and read.codec == codec
    estimate = unpack(read)[0]
    error = (estimate.float() - latents.float()).norm() / latents.float().norm()
    assert 0 < error < most
    assert same(estimate, unpack(packed)[0])


def test_a_layer_goes_where_it_is_wanted() -> None:
    latents = page(torch.float32)
    packed = pack(item(Kind.PAGE, latents), "lossless")
    strided = torch.full((64, 80), torch.nan)[:, ::2]
    unpack_layer(packed, 0, 1, strided)
    assert same(strided, latents[1])
    for layer in (-1, 2):
        with pytest.raises(IndexError):
            unpack_layer(packed, 0, layer, strided)
    with pytest.raises(ValueError, match="into"):
        unpack_layer(packed, 0, 1, torch.empty(64, 41))
    with pytest.raises(ValueError, match="into"):
        unpack_layer(packed, 0, 1, torch.empty(64, 40, dtype=torch.bfloat16))


@pytest.mark.parametrize("codec", CODECS)
def test_what_is_cut_or_of_another_model_is_refused(codec: Codec) -> None:
    written = b"".join(pack(item(Kind.PAGE, page(torch.bfloat16)), codec).buffers())
    for length in [*range(0, 200, 7), len(written) - 1]:
        with pytest.raises(BadPayload):
            Packed.parse(written[:length])
    with pytest.raises(BadPayload):
        Packed.parse(written + b"x")
    with pytest.raises(BadPayload, match="instead of"):
        Packed.parse(written, [((2, 64, 41), torch.bfloat16)])


def test_a_dtype_that_no_state_has_is_refused() -> None:
    for codec in CODECS:
        with pytest.raises(ValueError, match="int64"):
            pack(item(Kind.SESSION, torch.zeros(3, dtype=torch.int64)), codec)


def test_what_does_not_give_its_bytes_back_is_kept_raw(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A codec that errs, on this machine and these bytes, costs room and never a wrong bit."""
    right = planes.decode_rows

    def wrong(
        blobs: Sequence[memoryview], out: planes.Words, rows: Sequence[int], *, signed: bool = True
    ) -> None:
        right(blobs, out, rows, signed=signed)
        out[rows[0], 7] ^= 1

    latents = page(torch.bfloat16)
    with monkeypatch.context() as patch:
        patch.setattr(planes, "decode_rows", wrong)
        packed = [pack(item(Kind.PAGE, latents), codec) for codec in ("lossless", "int8")]
    assert [p.codec for p in packed] == ["raw", "raw"] and "kept raw" in caplog.text
    for one in packed:
        assert one.exact and one.base() is one and same(unpack(one)[0], latents)


def test_threads_unpack_and_pack_at_once() -> None:
    items = [item(Kind.PAGE, page(torch.bfloat16) * scale) for scale in range(1, 9)]

    def both(at: int) -> bool:
        one, codec = items[at % len(items)], CODECS[at % len(CODECS)]
        return same(unpack(pack(one, codec))[0], one.parts[0])

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(both, range(64)))


@pytest.mark.filterwarnings("ignore:overflow:RuntimeWarning")
@pytest.mark.parametrize("codec", CODECS)
def test_damage_is_found_or_stays_in_its_layer(codec: Codec) -> None:
    """Checksums are the store's; here nothing may crash, hang or write beside its layer."""
    latents = page(torch.bfloat16)
    written = b"".join(pack(item(Kind.PAGE, latents), codec).buffers())
    rng = random.Random(4)
    for _ in range(200):
        bad = bytearray(written)
        for _ in range(rng.randint(1, 8)):
            bad[rng.randrange(len(bad))] ^= 1 << rng.randrange(8)
        out = torch.full((3, 64, 40), 7.0, dtype=torch.bfloat16)
        try:
            read = Packed.parse(bytes(bad), [((2, 64, 40), torch.bfloat16)])
            unpack_layer(read, 0, 0, out[1])
        except BadPayload:
            pass
        assert (out[0] == 7).all() and (out[2] == 7).all()


@pytest.mark.parametrize("codec", ["int8", "int4"])
def test_a_base_is_told_from_the_exact_item_by_its_bytes(codec: Codec) -> None:
    packed = pack(item(Kind.PAGE, page(torch.bfloat16)), codec)
    exact, base = (b"".join(p.buffers()) for p in (packed, packed.base()))
    assert len(base) < len(exact) and not exact.startswith(base)
    codes = open_rows(packed.parts[0], packed.blob(0, 0))
    assert codes.codes.shape == (64, 40) and codes.codes.dtype == torch.int8
    assert codes.scales.shape == (64, 2) and codes.errors.shape == (64,)
    with pytest.raises(BadPayload):
        open_rows(packed.parts[0], packed.blob(0, 0)[:-1])
