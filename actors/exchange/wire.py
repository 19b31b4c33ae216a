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
    def _header(self) -> Tensor:
        return self.buffer[:HEADER_BYTES].view(torch.int64)

    @cached_property
    def _header_on_cpu(self) -> "np.ndarray | None":
        """Plain memory: a header is read and written in a microsecond instead of ten."""
        return self._header.numpy() if self.buffer.device.type == "cpu" else None

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
        values = (MAGIC, *at, rows, 0)
        if self._header_on_cpu is not None:
            self._header_on_cpu[:] = values
        else:
            self._header.copy_(torch.tensor(values))

    def read_header(self) -> tuple[int, Round, int]:
        """(magic, round, rows). On a GPU this waits for the message."""
        header = self._header_on_cpu if self._header_on_cpu is not None else self._header
        magic, epoch, step, layer, micro, chunk, rows, _ = header.tolist()
        return magic, Round(epoch, step, layer, micro, chunk), rows

    def mismatch(self, at: Round) -> str | None:
        """Why this is not the message of `at`; None when it is."""
        magic, got, rows = self.read_header()
        if magic != MAGIC:
            return f"not an exchange message (magic {magic:#x})"
        if got != at:
            return f"header mismatch: expected {_words(at)}, got {_words(got)}"
        if not 0 <= rows <= self.max_rows:
            return f"header mismatch: {rows} rows do not fit {self.max_rows}"
        return None

    @property
    def rows(self) -> int:
        return self.read_header()[2]

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


def aligned(size: int) -> int:
    return -(-size // ALIGN) * ALIGN


def _words(at: Round) -> str:
    return ", ".join(f"{name} {value}" for name, value in at._asdict().items())
