"""Bytes on the wire: a 64-byte header, then the sections of the rows back to back.

Every message lives in a preallocated buffer and is written in place; a message is a prefix of its
buffer, as long as its rows need. T rows, D latent width, K experts per token.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

HEADER_BYTES = 64
ALIGN = 16
MAGIC = 0x45584D32
# Views of messages up to this many rows are kept: decode steps ask for the same ones again.
CACHED_VIEWS = 64


class Round(NamedTuple):
    """One message of a step: the same five numbers on every rank, or the step is broken."""

    epoch: int
    step: int
    layer: int
    micro: int
    chunk: int


@dataclass(frozen=True, slots=True)
class Section:
    """`width` elements of `dtype` per row."""

    dtype: torch.dtype
    width: int

    @property
    def row_bytes(self) -> int:
        return self.dtype.itemsize * self.width


def dispatch_sections(dtype: torch.dtype, width: int, top_k: int) -> tuple[Section, ...]:
    """Latents, expert ids (-1: not here), router weights; a scale per row for float8 latents."""
    rows = (Section(dtype, width), Section(torch.int32, top_k), Section(torch.float32, top_k))
    return (*rows, Section(torch.float32, 1)) if dtype == torch.uint8 else rows


def combine_sections(dtype: torch.dtype, width: int) -> tuple[Section, ...]:
    return (Section(dtype, width),)


def message_bytes(sections: tuple[Section, ...], rows: int) -> int:
    return HEADER_BYTES + sum(aligned(section.row_bytes * rows) for section in sections)


def host_memory(tensor: Tensor) -> memoryview:
    """The tensor's bytes, shared."""
    array: Any = tensor.numpy()
    return memoryview(array).cast("B")


def new_buffer(size: int, device: torch.device) -> Tensor:
    """Made outside of inference mode: an inference tensor could not be written outside of it."""
    with torch.inference_mode(False):
        return torch.empty(size, dtype=torch.uint8, device=device)


class Header(NamedTuple):
    magic: int
    at: Round
    rows: int


class Frame:
    """One message buffer: header and typed views of its sections."""

    def __init__(
        self,
        sections: tuple[Section, ...],
        max_rows: int,
        device: torch.device,
        buffer: Tensor | None = None,
    ) -> None:
        self.sections, self.max_rows = sections, max_rows
        if buffer is None:
            buffer = new_buffer(message_bytes(sections, max_rows), device)
        self.buffer = buffer
        self._views: dict[int, tuple[Tensor, ...]] = {}
        self._prefixes: dict[int, Tensor] = {}
        self._spans: dict[int, memoryview] = {}

    @cached_property
    def header(self) -> Tensor:
        return self.buffer[:HEADER_BYTES].view(torch.int64)

    @cached_property
    def header_on_cpu(self) -> "np.ndarray | None":
        """Plain memory: a header is read and written in a microsecond instead of ten."""
        return self.header.numpy() if self.buffer.device.type == "cpu" else None

    @cached_property
    def memory(self) -> memoryview:
        """The buffer for sockets; host memory only."""
        return host_memory(self.buffer)

    def span(self, rows: int) -> memoryview:
        """`prefix` for sockets."""
        kept = self._spans.get(rows)
        if kept is None:
            kept = self.memory[: message_bytes(self.sections, rows)]
            if rows <= CACHED_VIEWS:
                self._spans[rows] = kept
        return kept

    def write_header(self, at: Round, rows: int) -> None:
        """Host memory only; see `write_headers`."""
        assert self.header_on_cpu is not None
        self.header_on_cpu[:] = (MAGIC, *at, rows, 0)

    def read_header(self) -> list[int]:
        """Host memory only; see `read_headers`."""
        assert self.header_on_cpu is not None
        words: list[int] = self.header_on_cpu.tolist()
        return words

    def mismatch(self, header: "Header", at: Round) -> str | None:
        """Why this, read here, is not the message of `at`; None when it is."""
        if header.magic != MAGIC:
            return f"not an exchange message (magic {header.magic:#x})"
        if header.at != at:
            return f"header mismatch: expected {_words(at)}, got {_words(header.at)}"
        if not 0 <= header.rows <= self.max_rows:
            return f"header mismatch: {header.rows} rows do not fit {self.max_rows}"
        return None

    def prefix(self, rows: int) -> Tensor:
        """The bytes that travel for that many rows."""
        kept = self._prefixes.get(rows)
        if kept is None:
            kept = self.buffer[: message_bytes(self.sections, rows)]
            if rows <= CACHED_VIEWS:
                self._prefixes[rows] = kept
        return kept

    def views(self, rows: int) -> tuple[Tensor, ...]:
        """One [rows, width] tensor per section, sharing the buffer."""
        kept = self._views.get(rows)
        if kept is None:
            kept = self._make_views(rows)
            if rows <= CACHED_VIEWS:
                self._views[rows] = kept
        return kept

    def _make_views(self, rows: int) -> tuple[Tensor, ...]:
        made, at = [], HEADER_BYTES
        for section in self.sections:
            size = section.row_bytes * rows
            part = self.buffer[at : at + size].view(section.dtype)
            made.append(part.view(rows, section.width))
            at += aligned(size)
        return tuple(made)


def write_headers(frames: list[Frame], at: Round, rows: list[int]) -> None:
    """rows: of each frame. To a device they travel together."""
    if frames[0].header_on_cpu is not None:
        for frame, count in zip(frames, rows, strict=True):
            frame.write_header(at, count)
        return
    words = torch.tensor([(MAGIC, *at, count, 0) for count in rows])
    for frame, header in zip(frames, words.to(frames[0].buffer.device), strict=True):
        frame.header.copy_(header)


def read_headers(frames: list[Frame]) -> list[Header]:
    """On a device this waits for the messages, once for all."""
    words: list[list[int]]
    if frames[0].header_on_cpu is not None:
        words = [frame.read_header() for frame in frames]
    else:
        words = torch.stack([frame.header for frame in frames]).tolist()
    return [Header(magic, Round(*at), rows) for magic, *at, rows, _ in words]


def aligned(size: int) -> int:
    return -(-size // ALIGN) * ALIGN


def _words(at: Round) -> str:
    return ", ".join(f"{name} {value}" for name, value in at._asdict().items())
