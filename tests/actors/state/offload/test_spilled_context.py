"""A sequence whose oldest pages are on disk: the same bits as from host memory, or lost."""

import errno
from functools import cache
from pathlib import Path

import pytest
import torch
from torch import Tensor

from expertmesh.actors.state.offload.context import OffloadedContext
from expertmesh.actors.state.offload.opening import offload_of
from expertmesh.actors.state.offload.spill import Shape, Spill
from expertmesh.actors.state.settings import StateSettings
from tests.actors.state.offload.test_context import ANSWER, PROMPT, expected, runner, token_ids
from tests.support.faulty_files import FaultyFiles
from tests.support.offload import LongText

# Of 13 pages nine leave, of which four pieces may be on disk.
NEAR = StateSettings(
    sink_tokens=64, window_tokens=128, offload_disk_tokens=128, select_pages=3, select_mass=0.5
)


def text(mode: str, folder: Path | None, fit_pages: int = 4, codec: str = "raw") -> LongText:
    """folder: None keeps all in host memory."""
    layout = runner().state.layout
    layers, tokens, width = layout.page
    shape = Shape(layers, tokens, width, layout.dtype)
    spill = None if folder is None else Spill(folder, shape, 5.0, None, FaultyFiles())
    settings = NEAR.model_copy(update={"codec": codec})
    shared = offload_of(runner().model, settings, fit_pages=fit_pages, spill=spill)
    assert shared is not None
    return LongText(runner(), shared, mode, 128)  # type: ignore[arg-type]


def context_of(long: LongText) -> OffloadedContext:
    assert long.context is not None
    return long.context


def faults(long: LongText) -> FaultyFiles:
    files = context_of(long)._shared.spill.files  # type: ignore[union-attr]
    assert isinstance(files, FaultyFiles)
    return files


# Of select: pages that a sketch is fitted to, and what estimates are made from.
CASES = [(4, "raw"), (7, "raw"), (4, "int8")]


@cache
def selected(fit_pages: int, codec: str) -> Tensor:
    long = text("select", None, fit_pages, codec)
    long.prompt(token_ids(PROMPT))
    return long.forced(token_ids(ANSWER, 1))


@pytest.fixture(scope="module", autouse=True)
def _before_any() -> None:
    """What is expected comes from the same slot."""
    expected()
    for case in CASES:
        selected(*case)


@pytest.mark.parametrize("pieces", [0, 1, 4])
def test_from_disk_come_the_same_bits(tmp_path: Path, pieces: int) -> None:
    long = text("offload", tmp_path)
    context_of(long).settle(pieces)
    assert torch.equal(long.prompt(token_ids(PROMPT)), expected()[0])
    assert torch.equal(long.forced(token_ids(ANSWER, 1)), expected()[1])
    context, page = context_of(long), runner().state.page_bytes
    assert context.cold_pages == 9 and context.host_bytes == (9 - 2 * pieces) * page
    assert bool(faults(long).reads) == bool(pieces) and not context.lost


def test_what_is_in_memory_moves_when_it_must(tmp_path: Path) -> None:
    """While an answer is generated, piece by piece, those that are whole."""
    long = text("offload", tmp_path)
    assert torch.equal(long.prompt(token_ids(PROMPT)), expected()[0])
    ids, page = token_ids(ANSWER, 1), runner().state.page_bytes
    for at, pieces in enumerate((0, 1, 2, 9)):
        context_of(long).settle(pieces)
        cold = context_of(long).cold_pages
        assert cold >= 7
        assert context_of(long).host_bytes == (cold - 2 * min(pieces, cold // 2)) * page
        found = long.forced(ids[at * 4 : at * 4 + 4])
        assert torch.equal(found, expected()[1][at * 4 : at * 4 + 4])


@pytest.mark.parametrize(("fit_pages", "codec"), CASES)
def test_selected_pages_come_from_disk_too(tmp_path: Path, fit_pages: int, codec: str) -> None:
    """Those that a sketch is fitted to among them, and of a piece only the pages that matter."""
    long = text("select", tmp_path, fit_pages, codec)
    context_of(long).settle(4)
    assert torch.equal(long.prompt(token_ids(PROMPT)), expected()[0])
    faults(long).reads.clear()
    assert torch.equal(long.forced(token_ids(ANSWER, 1)), selected(fit_pages, codec))
    reading, layers = context_of(long).reading, len(runner().config.mla_layers)
    page = runner().state.page_bytes // layers
    assert 0 < sum(faults(long).reads) <= reading.loaded_pages * page
    if codec == "raw":
        assert reading.read_pages == 3 * ANSWER * layers
        assert reading.loaded_pages < reading.read_pages
    else:
        assert reading.estimated_pages > 0 and reading.bits == 8.0


@pytest.mark.parametrize("mode", ["offload", "select"])
@pytest.mark.parametrize("how", ["read", "flip", "write"])
def test_what_is_lost_is_told_and_is_no_number_that_spreads(
    tmp_path: Path, mode: str, how: str
) -> None:
    long = text(mode, tmp_path)
    context_of(long).settle(2)
    long.prompt(token_ids(PROMPT)[:448])
    assert not context_of(long).lost
    if how == "read":
        faults(long).read_errno = errno.EIO
    elif how == "write":
        faults(long).write_errno = errno.ENOSPC
        context_of(long).settle(3)
    else:
        faults(long).flip = True
    found = long.prompt(token_ids(PROMPT)[448:])
    assert context_of(long).lost == {"read": "io", "flip": "corrupt", "write": "full"}[how]
    assert found.isfinite().all()
    before = len(faults(long).reads)
    assert long.forced(token_ids(2, 1)).isfinite().all()
    assert len(faults(long).reads) == before  # nothing is asked any more
    again = context_of(long).again()
    assert not again.disk and not again.lost and again.reading is context_of(long).reading


def test_a_sound_one_begins_again_with_its_disk(tmp_path: Path) -> None:
    long = text("offload", tmp_path)
    context_of(long).settle(2)
    long.prompt(token_ids(PROMPT))
    again = context_of(long).again()
    assert again.disk and again.cold_pages == 0 and context_of(long).cold_pages == 0
