"""Old pages of running sequences on disk, in pieces of many pages (kv-state 3.0, 3.4).

They are of use to nobody else and to no later process: each sequence writes to a file without a
name, whose blocks are free again when it ends, in whatever way. Nothing is synced, and what proves
the content stays in memory. Every call has a deadline, and what fails is lost, never wrong.

In a piece, layer follows layer, and page follows page: one read for a layer of all its pages, or
for one page.
"""

import os
import time
import weakref
from collections import Counter, deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
import xxhash
from torch import Tensor

from expertmesh.actors.state.alike import runs
from expertmesh.actors.state.disk.errors import DiskFailed, named
from expertmesh.actors.state.disk.files import Files
from expertmesh.actors.state.disk.seal import TAG_BYTES, Seal
from expertmesh.actors.state.offload.io_threads import IoThreads
from expertmesh.actors.state.store import Layered, fill_layer
from expertmesh.actors.state.tiers.breaker import Breaker

THREADS = 3
# Reads that are under way at a time: one is copied while others come.
AHEAD = 4
# What may take one timeout to read.
TIMED_BYTES = 64 << 20
# Why rows are lost; busy: others have failed lately.
REASONS = ("corrupt", "timeout", "io", "full", "error", "busy")


class Lost(Exception):
    """Rows that cannot be had, or not be stored. reason: one of REASONS."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class Shape(NamedTuple):
    """Of a page [L, 64, C]."""

    layers: int
    tokens: int
    width: int
    dtype: torch.dtype

    @property
    def layer_bytes(self) -> int:
        return self.tokens * self.width * self.dtype.itemsize


@dataclass(slots=True)
class SpillCounts:
    written_bytes: int = 0
    read_bytes: int = 0
    failures: Counter[str] = field(default_factory=lambda: Counter(dict.fromkeys(REASONS, 0)))


class Spill:
    """What the sequences of an engine share. Belongs to the engine's thread; from others, only
    `counts` may be read."""

    def __init__(
        self,
        folder: Path,
        shape: Shape,
        timeout_s: float,
        secret: bytes | None = None,
        files: Files | None = None,
        clock: Callable[[], float] = time.monotonic,
        pinned: bool = False,
    ) -> None:
        """timeout_s: of a write, and of a read of up to TIMED_BYTES. secret: whatever it is, what
        is on disk is then encrypted, with a key of this process. pinned: for copies to a GPU."""
        self.folder, self.shape, self.timeout_s = folder, shape, timeout_s
        self.seal = None if secret is None else Seal(os.urandom(32))
        self.files, self.counts = files or Files(), SpillCounts()
        self.threads = IoThreads("spill", THREADS)
        self._breaker = Breaker(clock)
        self._pinned = pinned
        self._spare: list[Tensor] = []

    @property
    def stride(self) -> int:
        """Bytes of one layer of one page, as they lie on disk."""
        return self.shape.layer_bytes + (0 if self.seal is None else TAG_BYTES)

    @property
    def usable(self) -> bool:
        """Whether it has not failed lately."""
        return not self._breaker.open

    def finish(self, future: "Future[None]", deadline: float) -> None:
        """Waits for a call of `threads`. Raises Lost, and counts why."""
        try:
            future.result(max(0.0, deadline - time.monotonic()))
        except TimeoutError:
            future.cancel()
            self._breaker.trip()
            raise self._lost("timeout") from None
        except Lost as error:  # its bytes came
            self._breaker.succeeded()
            raise self._lost(error.reason) from None
        except Exception as error:
            self._breaker.failed()
            reason = error.reason if isinstance(error, DiskFailed) else "error"
            raise self._lost(reason) from error
        self._breaker.succeeded()

    def ask(self) -> None:
        """Before anything is asked of the disk. Raises Lost."""
        if not self._breaker.allow():
            raise self._lost("busy")

    def _lost(self, reason: str) -> Lost:
        self.counts.failures[reason] += 1
        return Lost(reason)

    def take(self, pages: int) -> Tensor:
        """Host memory for a layer of so many pages, of undefined content, [>= pages, 64, C]."""
        for at, spare in enumerate(self._spare):
            if len(spare) >= pages:
                return self._spare.pop(at)
        shape = self.shape
        size = pages, shape.tokens, shape.width
        return torch.empty(size, dtype=shape.dtype, pin_memory=self._pinned)

    def give_back(self, memory: Tensor) -> None:
        """Nobody writes to it any more."""
        if len(self._spare) < AHEAD:
            self._spare.append(memory)


class SpillFile:
    """Of one sequence. Only grows."""

    def __init__(self, spill: Spill) -> None:
        self.spill, self._size = spill, 0
        self._fd: int | None = None

    def write(self, pages: Sequence[Layered]) -> list["SpilledPage"]:
        """Puts pages on the disk. Raises Lost; they are what they were then."""
        spill = self.spill
        spill.ask()
        piece = Piece(self, self._size, len(pages))
        future = spill.threads.submit(partial(self._write, piece, list(pages)))
        spill.finish(future, time.monotonic() + spill.timeout_s)
        nbytes = spill.shape.layers * len(pages) * spill.stride
        self._size += nbytes
        spill.counts.written_bytes += nbytes
        return [SpilledPage(piece, at) for at in range(len(pages))]

    @torch.inference_mode()
    def _write(self, piece: "Piece", pages: list[Layered]) -> None:
        spill, shape = self.spill, self.spill.shape
        rows = torch.empty(len(pages), shape.tokens, shape.width, dtype=shape.dtype)
        flat = rows.view(-1).view(torch.uint8).numpy().data
        with named("writing old pages"):
            fd, offset = self._open(), piece.offset
            for layer in range(shape.layers):
                fill_layer(pages, 0, layer, rows, range(len(pages)))
                for at in range(len(pages)):
                    body: bytes | memoryview = flat[at * shape.layer_bytes :][: shape.layer_bytes]
                    proof = xxhash.xxh3_128_digest(body)
                    if spill.seal is not None:
                        proof, body = spill.seal.close(bytes(body), b"")
                    piece.proofs.append(proof)
                    spill.files.write(fd, [body], offset)
                    offset += spill.stride

    @staticmethod
    def discard(last: "list[SpillFile]") -> None:
        """The file's blocks are freed, which takes a while. last: of all references to it."""
        last[0].spill.threads.submit(last.clear)

    def _open(self) -> int:
        if self._fd is None:
            files = self.spill.files
            path = self.spill.folder / f"old-pages-{os.getpid()}-{os.urandom(8).hex()}"
            self._fd = files.create(path)
            # When the last piece and the last call that reads one are gone.
            weakref.finalize(self, files.close, self._fd)
            files.unlink(path)
        return self._fd

    def read(self, piece: "Piece", layer: int, first: int, rows: Tensor) -> None:
        """Pages first.. of a piece, as many as `rows` [n, 64, C] takes. Any thread. Raises Lost
        for bytes that are not what was written, DiskFailed."""
        spill, size = self.spill, self.spill.shape.layer_bytes
        flat = rows.view(-1).view(torch.uint8).numpy().data
        begin = layer * piece.pages + first
        sealed = spill.seal is not None
        into = memoryview(bytearray(len(rows) * spill.stride)) if sealed else flat
        with named("reading old pages"):
            assert self._fd is not None
            offset = piece.offset + begin * spill.stride
            if spill.files.read(self._fd, [into], offset) < len(into):
                raise Lost("corrupt")
        for at, proof in enumerate(piece.proofs[begin : begin + len(rows)]):
            body = into[at * spill.stride :][: spill.stride]
            if spill.seal is None:
                if xxhash.xxh3_128_digest(body) != proof:
                    raise Lost("corrupt")
                continue
            plain = spill.seal.open(proof, body, b"")
            if plain is None:
                raise Lost("corrupt")
            flat[at * size :][:size] = plain


@dataclass(eq=False, slots=True)
class Piece:
    """proofs: of each layer's pages; a digest, or the nonce of what is sealed."""

    file: SpillFile
    offset: int
    pages: int
    proofs: list[bytes] = field(default_factory=list)


class SpilledPage:
    """Page `at` of a piece. Reading it raises Lost."""

    nbytes = 0  # in host memory

    def __init__(self, piece: Piece, at: int) -> None:
        self.piece, self.at = piece, at

    def layer(self, part: int, index: int, out: Tensor) -> None:
        self.layers([self], part, index, out.unsqueeze(0), [0])

    @staticmethod
    def layers(
        items: Sequence["SpilledPage"], part: int, index: int, out: Tensor, rows: Sequence[int]
    ) -> None:
        spill = items[0].piece.file.spill
        nbytes = len(items) * spill.shape.layer_bytes
        deadline = time.monotonic() + spill.timeout_s * max(1.0, nbytes / TIMED_BYTES)
        coming = deque[tuple[Future[None], Tensor, Tensor]]()
        spill.ask()
        try:
            # Neighbours in a piece, that are neighbours in `out`.
            for run in runs((id(i.piece), i.at - k, rows[k] - k) for k, i in enumerate(items)):
                if len(coming) == AHEAD:
                    _arrive(spill, coming, deadline)
                first, count = items[run.start], run.stop - run.start
                memory = spill.take(count)
                read = partial(first.piece.file.read, first.piece, index, first.at, memory[:count])
                to = out[rows[run.start] : rows[run.start] + count]
                coming.append((spill.threads.submit(read), memory, to))
            while coming:
                _arrive(spill, coming, deadline)
        finally:
            for future, _, _ in coming:
                future.cancel()
        spill.counts.read_bytes += nbytes


def _arrive(
    spill: Spill, coming: "deque[tuple[Future[None], Tensor, Tensor]]", deadline: float
) -> None:
    future, memory, to = coming.popleft()
    spill.finish(future, deadline)  # else the memory is still being written to, and never reused
    to.copy_(memory[: len(to)])
    spill.give_back(memory)


def piece_bytes(shape: Shape, pages: int) -> int:
    """Most that a piece takes on disk."""
    return shape.layers * pages * (shape.layer_bytes + TAG_BYTES)
