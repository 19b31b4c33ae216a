"""Per-sequence state of all layers: paged MLA latents and KDA slots (k3-model.md section 5)."""

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from expertmesh.actors.model.batch import PAGE_TOKENS
from expertmesh.actors.model.config import ModelConfig
from expertmesh.actors.state.item import StateLayout


def bytes_per_page(config: ModelConfig, dtype: torch.dtype) -> int:
    """Bytes of one 64-token page over all MLA layers."""
    layers = config.num_layers - len(config.kda_layers)
    width = config.kv_lora_rank + config.qk_rope_head_dim
    return layers * PAGE_TOKENS * width * dtype.itemsize


def bytes_per_slot(config: ModelConfig, dtype: torch.dtype) -> int:
    """Bytes of one sequence's KDA matrices (fp32) and conv windows over all KDA layers."""
    inner = config.kda_heads * config.kda_head_dim
    matrix = inner * config.kda_head_dim * torch.float32.itemsize
    window = (config.conv_kernel - 1) * 3 * inner * dtype.itemsize
    return len(config.kda_layers) * (matrix + window)


class Filling(Protocol):
    """State that is being written in the background, layer after layer."""

    def wait(self, layer: int) -> None:
        """Returns when the model's layer `layer` may read and write its state."""
        ...


class ModelState:
    """latents [mla layers, pages * 64, R + r]; kda [kda layers, slots, H, Dk, Dv] fp32;
    conv [kda layers, slots, W - 1, 3 * H * D]. A page is 64 tokens; row = page * 64 + offset.
    saved_kda, saved_conv: snapshots, shaped as kda and conv are.

    caches: the latents with one more page behind the last, which belongs to nobody and is never
    read: rows that only pad a batch write to `spare_row` in it.
    """

    def __init__(
        self,
        config: ModelConfig,
        pages: int,
        slots: int,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
        snapshots: int = 0,
    ) -> None:
        heads, width = config.kda_heads, config.kda_head_dim
        kda, mla = len(config.kda_layers), config.num_layers - len(config.kda_layers)
        rank = config.kv_lora_rank + config.qk_rope_head_dim
        self.config, self.layout = config, StateLayout.of(config, dtype)
        self.pages, self.slots, self.snapshots = pages, slots, snapshots
        self.spare_row = pages * PAGE_TOKENS
        self.caches = torch.zeros(
            mla, self.spare_row + PAGE_TOKENS, rank, dtype=dtype, device=device
        )
        self.latents = self.caches[:, : self.spare_row]
        window = (config.conv_kernel - 1, 3 * heads * width)
        matrix = (heads, width, width)
        self.kda = torch.zeros(kda, slots, *matrix, dtype=torch.float32, device=device)
        self.conv = torch.zeros(kda, slots, *window, dtype=dtype, device=device)
        self.saved_kda = torch.zeros(kda, snapshots, *matrix, dtype=torch.float32, device=device)
        self.saved_conv = torch.zeros(kda, snapshots, *window, dtype=dtype, device=device)
        self.filling: Sequence[Filling] = ()

    @property
    def page_bytes(self) -> int:
        return self.latents.nbytes // self.pages

    @property
    def slot_bytes(self) -> int:
        return (self.kda.nbytes + self.conv.nbytes) // self.slots

    def zero_slot(self, slot: int) -> None:
        """A new owner must start from the empty state, whatever its first span's length."""
        self.kda[:, slot].zero_()
        self.conv[:, slot].zero_()

    def zero_pages(self, pages: Sequence[int]) -> None:
        """Nothing of their last owner is left, whatever is read of them by mistake."""
        if pages:
            self.paged()[:, list(pages)] = 0

    def paged(self) -> Tensor:
        """The latents as [mla layers, pages, 64, R + r]."""
        return self.latents.view(self.latents.shape[0], self.pages, PAGE_TOKENS, -1)

    def restore(self, slot: int, snapshot: int) -> None:
        """A copy, so that the snapshot stays what it was."""
        self.kda[:, slot].copy_(self.saved_kda[:, snapshot])
        self.conv[:, slot].copy_(self.saved_conv[:, snapshot])

    def wait(self, layer: int) -> None:
        """Returns when all of layer `layer`'s state that is on its way here has arrived."""
        for one in self.filling:
            one.wait(layer)

    def arrive(self) -> None:
        """Returns when everything that is on its way here has arrived."""
        if self.filling:
            self.wait(self.config.num_layers - 1)

    def tensors(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.latents, self.kda, self.conv
