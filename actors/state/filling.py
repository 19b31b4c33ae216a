"""State on its way between host and device: out as private copies, in layer after layer."""

import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor

from expertmesh.actors.state.item import Header, Item
from expertmesh.actors.state.model_state import ModelState
from expertmesh.actors.state.store import Loaded, fill_layer

# A copy within one machine that takes longer does not come any more.
FILL_S = 60.0

_copier = ThreadPoolExecutor(1, "state-copier")


def take_out(header: Header, tensors: Sequence[Tensor]) -> Item:
    """An item with host copies of device memory as the work queued so far leaves it."""
    if tensors[0].device.type == "cpu":
        return Item(header, tuple(x.clone(memory_format=torch.contiguous_format) for x in tensors))
    parts = []
    for tensor in tensors:
        host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        parts.append(host.copy_(tensor, non_blocking=True))
    done = torch.cuda.Event()  # type: ignore[no-untyped-call]
    done.record()
    return Item(header, tuple(parts), done)


class LayerFill:
    """Pages and a snapshot that are copied into a sequence's own, in a background thread.

    The forward pass waits for each layer as it comes to it, so that the first layers compute while
    the last ones still travel. The sequence must not let go of its pages and slot before `wait` has
    returned for the last layer; every step that it takes part in ends in that way.
    """

    def __init__(
        self,
        state: ModelState,
        pages: Sequence[tuple[int, Loaded]],
        slot: int,
        snapshot: Loaded | None,
    ) -> None:
        """pages: (page of the device, content)."""
        self._state, self._pages, self._slot, self._snapshot = state, pages, slot, snapshot
        count = state.config.num_layers
        self._arrived = [threading.Event() for _ in range(count)]
        self._error: BaseException | None = None
        self._cuda: list[Any] = [None] * count
        self._begin: Any = None
        if state.latents.device.type == "cuda":
            self._begin = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._begin.record()  # what still uses this memory was queued before
        _copier.submit(self._run)

    def wait(self, layer: int) -> None:
        """Raises RuntimeError when the copy has failed or does not end."""
        if not self._arrived[layer].wait(FILL_S):
            raise RuntimeError(f"the state of layer {layer} has not arrived within {FILL_S:g} s")
        if self._error is not None:
            raise RuntimeError(f"state was not copied: {self._error}") from self._error
        if self._cuda[layer] is not None:
            torch.cuda.current_stream().wait_event(self._cuda[layer])

    def _run(self) -> None:
        try:
            if self._begin is None:
                self._copy()
            else:
                with torch.cuda.stream(torch.cuda.Stream()):  # type: ignore[no-untyped-call]
                    torch.cuda.current_stream().wait_event(self._begin)
                    self._copy()
                    torch.cuda.current_stream().synchronize()
        except BaseException as error:
            self._error = error
        finally:
            for event in self._arrived:
                event.set()

    @torch.inference_mode()
    def _copy(self) -> None:
        state, config = self._state, self._state.config
        paged = state.paged()
        pages, contents = [page for page, _ in self._pages], [item for _, item in self._pages]
        for layer in range(config.num_layers):
            if config.is_kda(layer):
                at = config.kda_index(layer)
                if self._snapshot is not None:
                    self._snapshot.layer(0, at, state.kda[at, self._slot])
                    self._snapshot.layer(1, at, state.conv[at, self._slot])
            else:
                at = config.mla_index(layer)
                fill_layer(contents, 0, at, paged[at], pages)
            if self._begin is not None:
                self._cuda[layer] = torch.cuda.Event()  # type: ignore[no-untyped-call]
                self._cuda[layer].record()
            self._arrived[layer].set()
