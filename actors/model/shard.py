"""One safetensors file: its header, checked against the file's size, and two ways to read it.

The format (huggingface/safetensors): 8 bytes little-endian header length, a JSON header
{name: {dtype, shape, data_offsets: [begin, end]}}, then the data without gaps to the end of file.
The package's own reader opens a cut-off or appended file with messages that name no file, so the
header is parsed here; the data needs no parsing.
"""

import mmap
import os
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Annotated, Literal, NamedTuple

import msgspec
import torch
from torch import Tensor

from expertmesh.actors.model.problems import CheckpointError

ReadMode = Literal["mmap", "sequential"]

_MAX_HEADER = 100_000_000  # the format's own limit
_LFS_POINTER = b"version https://git-lfs"
# One request per block keeps a network file system streaming, and its read-ahead effective.
_BLOCK = 16 << 20
# In Python's mmap module from 3.13 on; the number is Linux's.
_MAP_NORESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000 if sys.platform == "linux" else 0)

# Formats that occur in headers. Only those of tensors.DTYPE_BYTES are ever loaded.
_ITEM_BYTES = {
    "BOOL": 1, "U8": 1, "I8": 1, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1, "I16": 2, "U16": 2,
    "F16": 2, "BF16": 2, "I32": 4, "U32": 4, "F32": 4, "I64": 8, "U64": 8, "F64": 8,
}  # fmt: skip
_TORCH = {"U8": torch.uint8, "BF16": torch.bfloat16, "F32": torch.float32}


_Size = Annotated[int, msgspec.Meta(ge=0)]


class _HeaderEntry(msgspec.Struct, gc=False):
    # The defaults take "__metadata__", which is an object without these keys.
    dtype: str = ""
    shape: tuple[_Size, ...] = ()
    data_offsets: tuple[_Size, _Size] = (0, 0)


# A K3 index has half a million entries; a typed decoder is several times faster than json.
_HEADER = msgspec.json.Decoder(dict[str, _HeaderEntry])


class Entry(NamedTuple):
    """Where one tensor lies. `begin` and `end` are byte offsets in the file."""

    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int

    @property
    def nbytes(self) -> int:
        """Bytes in the file."""
        return self.end - self.begin


@dataclass(frozen=True, slots=True)
class Shard:
    """A shard whose header has been read and whose size agrees with it."""

    path: Path
    size: int
    entries: dict[str, Entry]


def read_shard(path: Path) -> Shard:
    """Read and check the header of `path`; the data is not touched.

    Raises CheckpointError naming the file and the expected and actual size, or the tensor.
    """
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            start = file.read(8)
            if size >= 8:
                length = int.from_bytes(start, "little")
                _refuse_bad_length(path, size, length, start + file.read(32))
                file.seek(8)
                header = file.read(length)
    except OSError as error:
        raise CheckpointError(
            f"{path.name}: cannot be read ({error.strerror})", file=path.name
        ) from error
    if size < 8:
        raise CheckpointError(
            f"{path.name}: {size} bytes, too short for a safetensors file (the 8-byte header "
            "length is cut off)",
            file=path.name,
            expected="at least 8 bytes",
            found=f"{size} bytes",
        )
    entries = _parse_header(path, header, 8 + length)
    end = max((entry.end for entry in entries.values()), default=8 + length)
    if end != size:
        what = "is cut off" if size < end else "has bytes after its last tensor"
        raise CheckpointError(
            f"{path.name}: {what}: the header needs {end} bytes, the file has {size}",
            file=path.name,
            expected=f"{end} bytes",
            found=f"{size} bytes",
        )
    return Shard(path, size, entries)


def is_lfs_pointer(path: Path) -> bool:
    """Whether `path` holds the place of a file that was not fetched. Raises OSError."""
    with path.open("rb") as file:
        return file.read(len(_LFS_POINTER)) == _LFS_POINTER


def _refuse_bad_length(path: Path, size: int, length: int, start: bytes) -> None:
    if start.startswith(_LFS_POINTER):
        raise CheckpointError(
            f"{path.name}: a Git LFS pointer, not the weights ({size} bytes); fetch them first",
            file=path.name,
            expected="a safetensors file",
            found="a Git LFS pointer",
        )
    if not 2 <= length <= _MAX_HEADER:
        raise CheckpointError(
            f"{path.name}: not a safetensors file (header length {length}, file {size} bytes)",
            file=path.name,
            expected=f"a header of 2 to {_MAX_HEADER} bytes",
            found=f"{length} bytes",
        )
    if 8 + length > size:
        raise CheckpointError(
            f"{path.name}: is cut off inside its header: the header ends at byte {8 + length}, "
            f"the file has {size}",
            file=path.name,
            expected=f"at least {8 + length} bytes",
            found=f"{size} bytes",
        )


def _parse_header(path: Path, header: bytes, data_start: int) -> dict[str, Entry]:
    """Names to entries. A name written twice keeps its last entry; the bytes of the other then
    show up as a gap."""
    try:
        raw = _HEADER.decode(header)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise CheckpointError(
            f"{path.name}: unreadable header ({str(error)[:200]})", file=path.name
        ) from None
    raw.pop("__metadata__", None)
    shapes: dict[tuple[int, ...], tuple[int, ...]] = {}  # one object per shape, not per tensor
    entries = {}
    for name, fields in raw.items():
        (begin, end), shape = fields.data_offsets, fields.shape
        if not fields.dtype:
            raise CheckpointError(
                f"{path.name}: tensor {name}: header entry without a dtype",
                file=path.name,
                tensor=name,
            )
        expected = prod(shape) * _ITEM_BYTES.get(fields.dtype, 0)
        if fields.dtype in _ITEM_BYTES and end - begin != expected:
            raise CheckpointError(
                f"{path.name}: tensor {name}: {end - begin} bytes for {fields.dtype} {list(shape)}",
                file=path.name,
                tensor=name,
                expected=f"{expected} bytes",
                found=f"{end - begin} bytes",
            )
        shape = shapes.setdefault(shape, shape)
        entries[name] = Entry(sys.intern(fields.dtype), shape, data_start + begin, data_start + end)
    _refuse_gaps(path, entries, data_start)
    return entries


def _refuse_gaps(path: Path, entries: dict[str, Entry], data_start: int) -> None:
    """The format lays tensors end to end; anything else means that two would share bytes."""
    position = data_start
    for begin, end, name in sorted((e.begin, e.end, name) for name, e in entries.items()):
        if begin != position or end < begin:
            raise CheckpointError(
                f"{path.name}: tensor {name}: bytes {begin} to {end}, expected to start at "
                f"{position}",
                file=path.name,
                tensor=name,
                expected=f"start at byte {position}",
                found=f"bytes {begin} to {end}",
            )
        position = end


class ShardReader:
    """Tensors out of one shard.

    mmap: views of a private map, nothing is copied or read before it is used.
    sequential: whole ranges in large blocks into fresh memory, for disks where a page fault is a
    network round trip (C15). Neighbouring ranges asked for together are one read.
    Thread-safe. `count` is called with the bytes handed out.
    """

    def __init__(self, shard: Shard, mode: ReadMode, count: Callable[[int], None]) -> None:
        self._shard = shard
        self._mode = mode
        self._count = count
        self._lock = threading.Lock()
        self._map: mmap.mmap | None = None

    def tensors(self, names: Sequence[str]) -> list[Tensor]:
        """The tensors `names`, in that order; best asked for in file order."""
        entries = [self._shard.entries[name] for name in names]
        if self._mode == "mmap":
            made = [_view(self._mapped(), entry, entry.begin) for entry in entries]
        else:
            made = self._read(entries)
        self._count(sum(entry.nbytes for entry in entries))
        return made

    def close(self) -> None:
        """Drop the map. Tensors already handed out keep their memory."""
        with self._lock:
            self._map = None

    def _mapped(self) -> mmap.mmap:
        with self._lock:
            if self._map is None:
                with self._shard.path.open("rb") as file:
                    # Private: torch wants writable memory, the file must never change. Without
                    # a reservation, or a shard larger than main memory could not be mapped.
                    self._map = mmap.mmap(
                        file.fileno(),
                        0,
                        flags=mmap.MAP_PRIVATE | _MAP_NORESERVE,
                        prot=mmap.PROT_READ | mmap.PROT_WRITE,
                    )
            return self._map

    def _read(self, entries: Sequence[Entry]) -> list[Tensor]:
        made: dict[int, Tensor] = {}
        order = sorted(range(len(entries)), key=lambda i: entries[i].begin)
        with self._shard.path.open("rb", buffering=0) as file:
            if hasattr(os, "posix_fadvise"):
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_SEQUENTIAL)
            while order:
                run = [order.pop(0)]
                while order and entries[order[0]].begin == entries[run[-1]].end:
                    run.append(order.pop(0))
                begin, end = entries[run[0]].begin, entries[run[-1]].end
                block = self._read_range(file.fileno(), begin, end)
                for i in run:
                    made[i] = _view(block, entries[i], entries[i].begin - begin)
        return [made[i] for i in range(len(entries))]

    def _read_range(self, descriptor: int, begin: int, end: int) -> bytearray:
        block = bytearray(end - begin)
        view, done = memoryview(block), 0
        while done < len(block):
            got = os.preadv(descriptor, [view[done : done + _BLOCK]], begin + done)
            if got == 0:
                raise CheckpointError(
                    f"{self._shard.path.name}: became shorter while it was read: no byte "
                    f"{begin + done}, {self._shard.size} expected"
                )
            done += got
        return block


def _view(buffer: mmap.mmap | bytearray, entry: Entry, offset: int) -> Tensor:
    """A tensor over `buffer` at `offset`; copied only where the offset is not aligned."""
    dtype = _TORCH[entry.dtype]
    count = prod(entry.shape)
    if count == 0:
        return torch.empty(entry.shape, dtype=dtype)
    if offset % dtype.itemsize == 0:
        flat = torch.frombuffer(buffer, dtype=dtype, count=count, offset=offset)
    else:
        raw = torch.frombuffer(buffer, dtype=torch.uint8, count=entry.nbytes, offset=offset)
        flat = raw.clone().view(dtype)
    return flat.view(entry.shape)
