"""What tiers hold: pages of latents, snapshots of recurrent state, and manifests of sessions."""

from dataclasses import dataclass, field
from enum import IntEnum
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from expertmesh.actors.model.batch import PAGE_TOKENS
from expertmesh.actors.model.config import ModelConfig

Lineage = Literal["prefill", "decode"]
Tier = Literal["hot", "host", "disk"]


class Kind(IntEnum):
    """Pages and snapshots share keys: a snapshot's is that of the page that ends where it stands.
    Numbers are on disk."""

    PAGE = 1
    SNAPSHOT = 2
    SESSION = 3


class Name(NamedTuple):
    key: bytes
    kind: Kind


@dataclass(frozen=True, slots=True)
class Header:
    """What is known of an item besides its bytes.

    parent: key of the page before. position: tokens from the start up to the item's end. tokens:
    the ids of its page, compared on a hit, so that no collision can ever return strange state.
    lineage: prefill where the whole prefix was computed as a prompt, on the 64-token grid.
    layout: fingerprint of shapes, dtypes and order of the bytes.
    """

    key: bytes
    kind: Kind
    parent: bytes
    position: int
    tokens: tuple[int, ...]
    lineage: Lineage
    layout: bytes

    @property
    def name(self) -> Name:
        return Name(self.key, self.kind)


@dataclass(frozen=True, slots=True)
class Item:
    """A header with its bytes: host tensors that belong to the item and are never written again.

    parts: of a page [latents [mla layers, 64, R + r]]; of a snapshot [kda [kda layers, H, Dk, Dv]
    fp32, conv [kda layers, W - 1, C]]; of a session [uint8 [n]]. ready: what must have happened
    before the bytes are there (a CUDA event), None for at once.
    """

    header: Header
    parts: tuple[Tensor, ...]
    ready: torch.cuda.Event | None = None

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self.parts)


@dataclass(frozen=True)
class StateLayout:
    """Shapes and dtypes of a model's state; all instances of one model agree on it."""

    page: tuple[int, ...]  # [mla layers, 64, R + r]
    kda: tuple[int, ...]  # [kda layers, H, Dk, Dv]
    conv: tuple[int, ...]  # [kda layers, W - 1, C]
    dtype: torch.dtype  # of latents and conv windows; KDA matrices are float32
    fingerprint: bytes = field(init=False)

    def __post_init__(self) -> None:
        from hashlib import blake2b

        text = f"{self.page} {self.kda} {self.conv} {self.dtype} float32 page-layer-token-row"
        object.__setattr__(self, "fingerprint", blake2b(text.encode(), digest_size=16).digest())

    @classmethod
    def of(cls, config: ModelConfig, dtype: torch.dtype) -> "StateLayout":
        kda = len(config.kda_layers)
        heads, dim = config.kda_heads, config.kda_head_dim
        width = config.kv_lora_rank + config.qk_rope_head_dim
        return cls(
            page=(config.num_layers - kda, PAGE_TOKENS, width),
            kda=(kda, heads, dim, dim),
            conv=(kda, config.conv_kernel - 1, 3 * heads * dim),
            dtype=dtype,
        )

    def parts(self, kind: Kind) -> list[tuple[tuple[int, ...], torch.dtype]]:
        """Shape and dtype of each part of an item; sessions are of any length."""
        if kind is Kind.PAGE:
            return [(self.page, self.dtype)]
        if kind is Kind.SNAPSHOT:
            return [(self.kda, torch.float32), (self.conv, self.dtype)]
        return []

    def nbytes(self, kind: Kind) -> int:
        return sum(dtype.itemsize * torch.Size(s).numel() for s, dtype in self.parts(kind))
