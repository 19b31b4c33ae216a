"""What the messages of an epoch look like. Every rank must come to the same answer."""

from dataclasses import dataclass

import torch

from expertmesh.actors.exchange.process_group import Groups, Where
from expertmesh.actors.exchange.settings import ExchangeSettings
from expertmesh.actors.exchange.wire import Section, combine_sections, dispatch_sections

DTYPES = {
    "float64": torch.float64,
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float8": torch.uint8,
}


@dataclass(frozen=True, slots=True)
class Formats:
    """Sections of the messages in both directions, and how many rows one message takes."""

    layout: str
    dispatch: tuple[Section, ...]
    combine: tuple[Section, ...]
    max_rows: int


def formats_of(
    settings: ExchangeSettings, width: int, top_k: int, dtype: torch.dtype, device: torch.device
) -> Formats:
    """dtype: what the model computes in."""
    on_cpu = device.type == "cpu"
    layout, there, back = settings.layout, settings.dispatch_dtype, settings.combine_dtype
    if layout == "auto":
        layout = "direct" if on_cpu else "mixed"
    if there == "auto":
        there = "float32" if on_cpu else "bfloat16"
    if back == "auto":
        back = "float64" if dtype == torch.float32 else "float32"
    dispatch = dispatch_sections(DTYPES[there], width, top_k)
    return Formats(layout, dispatch, combine_sections(DTYPES[back], width), settings.max_rows)


def agree(groups: Groups, formats: Formats) -> None:
    """Raises ExchangeError when another rank of the epoch has other formats."""
    mine = repr(formats)
    try:
        found = groups.store.offer("formats", mine)
    except RuntimeError as error:
        raise groups.lost(Where(groups.rank, -1, "join", -1), error) from error
    if found != mine:
        groups.close()
        reason = f"the ranks disagree on the messages: {mine} here, {found} elsewhere"
        raise Where(groups.rank, -1, "join", -1).error(reason)
