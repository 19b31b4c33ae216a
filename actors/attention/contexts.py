"""Requests whose old pages leave the device: which ones, and what is told of them."""

from collections.abc import Iterable
from math import isfinite

from torch import Tensor

from expertmesh.actors.attention.messages import GenerateRequest, KvReport
from expertmesh.actors.attention.sequence import Sequence
from expertmesh.actors.attention.settings import EngineSettings
from expertmesh.actors.attention.validation import peak_tokens
from expertmesh.actors.model.batch import PAGE_TOKENS
from expertmesh.actors.model.model import Model
from expertmesh.actors.state.item import StateLayout
from expertmesh.actors.state.offload.opening import offload_of, spill_of
from expertmesh.actors.state.offload.room import OffloadRoom
from expertmesh.actors.state.pages import pages_for
from expertmesh.actors.state.stats import CacheStats


def near_pages(settings: EngineSettings) -> int:
    """Device pages of a sequence whose old pages leave: sinks, window, the piece of its prompt that
    is computed, and one that the window has not quite left."""
    state = settings.state
    tokens = state.sink_tokens + state.window_tokens + max(settings.step_tokens, PAGE_TOKENS)
    return pages_for(tokens) + 1


class Contexts:
    """near_pages: as above; 0 where the model can read no pages that are elsewhere. room: for
    those."""

    def __init__(self, model: object, settings: EngineSettings, latents: Tensor) -> None:
        """latents: of the engine's state. Raises ValueError where kv_mode asks for what the model
        cannot do."""
        self._settings = settings
        self._offload, layout, self.near_pages = None, None, 0
        if isinstance(model, Model) and model.config.mla_layers:
            layout = StateLayout.of(model.config, latents.dtype)
            self.near_pages = near_pages(settings)
            spill = spill_of(settings.state, layout, latents.device)
            self._offload = offload_of(model, settings.state, spill=spill)
        self.room = OffloadRoom(settings.state, layout)
        if self._offload is None and settings.state.kv_mode != "exact":
            raise ValueError(f"kv_mode {settings.state.kv_mode}: the model has no MLA layers")

    def enter(self, seq: Sequence, request: GenerateRequest) -> str:
        """Gives the sequence its context, where it needs one. The name of how its state is
        computed, for keys: what was selected is kept apart from what is exact (kv-state 3.5)."""
        state = self._settings.state
        mode = request.kv_mode or state.kv_mode
        peak = peak_tokens(seq.prompt_len, seq.params.max_tokens)
        if self._offload is None or mode == "exact" or pages_for(peak) <= self.near_pages:
            return "exact"
        if not self.room.ever(self.room.far(mode, peak)):
            return "exact"  # then the device has room: check_request has seen to it
        seq.context = self._offload.context("select" if mode == "select" else "offload")
        if seq.context.disk and not self._offload.spill_usable and not self.hopeless(seq):
            seq.context.disk = False
        if mode == "offload":
            return "exact"
        sizes = state.sink_tokens, state.window_tokens, state.select_pages
        return f"select {sizes} {state.select_mass}"

    def settle(self, running: Iterable[Sequence]) -> None:
        """Before a step: what has no room in host memory any more goes to disk."""
        for seq in running:
            if seq.context is not None:
                seq.context.settle(self.room.on_disk(seq.number))

    def hopeless(self, seq: Sequence) -> str:
        """Why a sequence whose old pages are lost has no room without the disk; "" where it has."""
        assert seq.context is not None
        peak = peak_tokens(seq.prompt_len, seq.params.max_tokens)
        far = self.room.far(seq.context.mode, peak, disk=False)
        if self.room.ever(far):
            return ""
        return f"old pages on disk are lost ({seq.context.lost}): they {self.room.shortage(far)}"

    def rest(self) -> None:
        """A step has ended."""
        if self._offload is not None:
            self._offload.scratch.rest()

    def report(self, seq: Sequence) -> KvReport | None:
        """None for what is exact."""
        context = seq.context
        if context is None or context.mode != "select":
            return None
        reading = context.reading
        proven = isfinite(reading.bound)
        return KvReport(
            mode="select",
            bits=reading.bits,
            read_pages=reading.read_pages,
            estimated_pages=reading.estimated_pages,
            bound=reading.bound if proven else reading.estimated_share,
            bound_kind="certificate" if proven else "estimate",
        )

    def count(self, stats: CacheStats, running: Iterable[Sequence]) -> None:
        """From any thread."""
        contexts = [seq.context for seq in running]
        stats.offloaded_bytes = sum(one.host_bytes for one in contexts if one is not None)
        stats.offload_capacity_bytes = self.room.capacity
        stats.spilled_bytes = self.room.disk_bytes
        stats.spill_capacity_bytes = self.room.disk_capacity
        if self._offload is not None:
            if self._offload.spill is not None:
                counts = self._offload.spill.counts
                stats.spill_written_bytes = counts.written_bytes
                stats.spill_read_bytes = counts.read_bytes
                stats.spill_failures = dict(counts.failures)
            stats.selected_pages = self._offload.total.read_pages
            stats.skipped_pages = self._offload.total.estimated_pages
