"""The bytes of a checkpoint, each read once: digests of the files, and a look at every value.

A thread takes one file at a time and holds one piece of it, so memory is bounded by the number of
threads whatever the size of the model.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, BinaryIO, Protocol

import numpy as np
from numpy.typing import NDArray

from expertmesh.actors.model.shard import Entry, Shard
from expertmesh.deploy.verify.findings import Finding, Findings, Severity
from expertmesh.kernels.quant.torch_ops import INVALID_SCALE

PIECE = 4 << 20
# Downloads that were cut off leave holes of zeros in files that have their full size.
PAGE = 4096
# Weights of trained models are far below; what is above was read in the wrong format.
LARGEST_WEIGHT = 1e4
# Exponents of mxfp4 blocks: 6 * 2^10 is the same bound, and 2^-60 is nothing beside any weight.
LARGEST_SCALE, SMALLEST_SCALE = 127 + 10, 127 - 60
_WORDS = {"BF16": ("<u2", 0x7FFF, 0x7F80), "F32": ("<u4", 0x7FFFFFFF, 0x7F800000)}
# Biases may be zero, ids may be unused, and with one source to mix a query decides nothing.
_ZEROS_MEAN_NOTHING = (
    "bias", "embed_tokens.weight", "lm_head.weight", "A_log",
    ".layers.0.self_attention_res_proj.weight",
)  # fmt: skip


class Hasher(Protocol):
    """hashlib's, blake3's and xxhash's objects alike."""

    def update(self, data: Any, /) -> Any: ...
    def hexdigest(self) -> str: ...


Count = Callable[[int], None]


def read_plain(path: Path, hashers: Sequence[Hasher], count: Count) -> int:
    """Any file into `hashers`. Returns its size. Raises OSError."""
    size, buffer = 0, memoryview(bytearray(PIECE))
    with path.open("rb", buffering=0) as file:
        while got := file.readinto(buffer):
            for hasher in hashers:
                hasher.update(buffer[:got])
            size += got
            count(got)
    return size


def read_shard_values(
    shard: Shard, hashers: Sequence[Hasher], count: Count, findings: Findings
) -> None:
    """A whole shard in file order into `hashers`, every tensor looked at. Raises OSError."""
    buffer = memoryview(bytearray(PIECE))
    entries = sorted(shard.entries.items(), key=lambda item: item[1].begin)
    head = min((entry.begin for _, entry in entries), default=shard.size)
    with shard.path.open("rb") as file:

        def read(size: int) -> memoryview:
            piece = buffer[:size]
            _fill(file, piece, shard)
            for hasher in hashers:
                hasher.update(piece)
            count(size)
            return piece

        for size in _pieces(head, 1):
            read(size)
        for name, entry in entries:
            look = _look_at(name, entry)
            for size in _pieces(entry.nbytes, look.unit):
                look.take(np.frombuffer(read(size), np.uint8))
            for severity, text, expected, found in look.findings():
                place = f"{name} in {shard.path.name}"
                findings.add(
                    Finding(
                        severity, "values", f"{place}: {text}", shard.path.name, name, expected,
                        found,
                    )
                )  # fmt: skip


def _fill(file: BinaryIO, piece: memoryview, shard: Shard) -> None:
    done = 0
    while done < len(piece):
        got = file.readinto(piece[done:])  # type: ignore[attr-defined]
        if not got:
            raise OSError(f"became shorter while it was read, {shard.size} bytes expected")
        done += got


def _pieces(size: int, unit: int) -> list[int]:
    """Sizes of at most PIECE that are whole units, and add up to `size`."""
    most = max(PIECE // unit, 1) * unit if unit <= PIECE else PIECE
    return [min(most, size - at) for at in range(0, size, most)]


Told = tuple[Severity, str, str, str]  # severity, what, expected, found


def _look_at(name: str, entry: Entry) -> "_Look":
    if entry.dtype in _WORDS:
        return _FloatLook(name, entry)
    if entry.dtype == "U8" and name.endswith(".weight_scale"):
        return _ScaleLook(name, entry)
    return _Look(name, entry)


@dataclass
class _Look:
    """Bytes without a meaning here: only zeros are noticed."""

    name: str
    entry: Entry
    unit: int = PAGE
    seen: int = 0
    pages: int = 0
    empty_pages: int = 0
    first_empty: int = -1
    nonzero: bool = False

    def take(self, piece: NDArray[np.uint8]) -> None:
        """The next piece; all but the last are whole units."""
        self._take_pages(piece)
        self.seen += piece.size

    def _take_pages(self, piece: NDArray[np.uint8]) -> None:
        whole = piece.size // PAGE * PAGE
        words = piece[:whole].view(np.uint64).reshape(-1, PAGE // 8)
        filled = words.any(axis=1)
        empty = int(filled.size - np.count_nonzero(filled))
        if empty and self.first_empty < 0:
            self.first_empty = self.seen + int(np.argmin(filled)) * PAGE
        self.pages += filled.size
        self.empty_pages += empty
        self.nonzero = self.nonzero or empty < filled.size or bool(piece[whole:].any())

    def findings(self) -> list[Told]:
        if self.seen == 0 or self.name.endswith(_ZEROS_MEAN_NOTHING):
            return []
        if not self.nonzero:
            return [("warning", "every byte is zero", "values", "zeros")]
        if self.empty_pages:
            text = (
                f"{self.empty_pages} of {self.pages} blocks of {PAGE} bytes are zero, the first "
                f"at byte {self.first_empty} of the tensor"
            )
            return [("warning", text, "values", "zeros")]
        return []


@dataclass
class _FloatLook(_Look):
    """bf16 or float32 weights, read as integers: magnitudes keep their order, and a full exponent
    is infinity or NaN."""

    largest: int = 0
    bad: int = 0
    first_bad: int = -1

    def take(self, piece: NDArray[np.uint8]) -> None:
        kind, magnitude, full = _WORDS[self.entry.dtype]
        words = piece.view(kind) & magnitude
        top = int(words.max(initial=0))
        if top >= full:
            wrong = words >= full
            if self.first_bad < 0:
                self.first_bad = self.seen // words.itemsize + int(np.argmax(wrong))
            self.bad += int(np.count_nonzero(wrong))
        self.largest = max(self.largest, top)
        super().take(piece)

    def findings(self) -> list[Told]:
        told: list[Told] = []
        if self.bad:
            place = _index(self.first_bad, self.entry.shape)
            text = f"{self.bad} values are not finite, the first at {place}"
            told.append(("error", text, "finite values", f"{self.bad} infinite or NaN"))
        elif self._largest_value() > LARGEST_WEIGHT:
            text = f"largest magnitude {self._largest_value():.3g}"
            told.append(("warning", text, f"at most {LARGEST_WEIGHT:g}", text))
        return told + super().findings()

    def _largest_value(self) -> float:
        bits = self.largest << 16 if self.entry.dtype == "BF16" else self.largest
        return float(np.array(bits, np.uint32).view(np.float32))


@dataclass
class _ScaleLook(_Look):
    """Exponent bytes [rows, groups] of an mxfp4 matrix."""

    bad: int = 0
    first_bad: int = -1
    odd: int = 0
    smallest: int = 255
    largest: int = 0
    empty_rows: int = 0

    def __post_init__(self) -> None:
        self.unit = max(1, self.entry.shape[-1] if self.entry.shape else 1)

    def take(self, piece: NDArray[np.uint8]) -> None:
        wrong = piece == INVALID_SCALE
        if wrong.any():
            if self.first_bad < 0:
                self.first_bad = self.seen + int(np.argmax(wrong))
            self.bad += int(np.count_nonzero(wrong))
        if piece.size % self.unit == 0:
            rows = piece.reshape(-1, self.unit).any(axis=1)
            self.empty_rows += int(rows.size - np.count_nonzero(rows))
        # Byte 0 is what a block of zeros gets; alone it says nothing.
        odd = ((piece > LARGEST_SCALE) | (piece < SMALLEST_SCALE) & (piece > 0)) & ~wrong
        self.odd += int(np.count_nonzero(odd))
        if odd.any():
            self.smallest = min(self.smallest, int(piece[odd].min()))
            self.largest = max(self.largest, int(piece[odd].max()))
        self.nonzero = self.nonzero or bool(piece.any())
        self.seen += piece.size

    def findings(self) -> list[Told]:
        told: list[Told] = []
        usual = f"bytes {SMALLEST_SCALE} to {LARGEST_SCALE}"
        if self.bad:
            place = _index(self.first_bad, self.entry.shape)
            text = f"scale byte 255 (NaN) at {place}, {self.bad} in all"
            told.append(("error", text, "bytes 0 to 254", f"{self.bad} of 255"))
        if self.odd:
            text = f"{self.odd} blocks have unusual scales, {self.smallest} to {self.largest}"
            told.append(("warning", text, usual, f"{self.smallest} to {self.largest}"))
        if self.seen and not self.nonzero:
            told.append(("warning", "every scale is zero: the weights vanish", usual, "zeros"))
        elif self.empty_rows:
            text = f"{self.empty_rows} rows have no scale but zero: their weights vanish"
            told.append(("warning", text, usual, f"{self.empty_rows} rows of zeros"))
        return told


def _index(flat: int, shape: tuple[int, ...]) -> list[int]:
    return [int(at) for at in np.unravel_index(flat, shape)] if prod(shape) else [flat]
