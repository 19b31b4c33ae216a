"""From a model to what its contexts share."""

import os
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, Protocol

import torch
from torch import Tensor

from expertmesh.actors.model.layers import Mla
from expertmesh.actors.state.item import StateLayout
from expertmesh.actors.state.offload.context import Offload
from expertmesh.actors.state.offload.spill import Shape, Spill
from expertmesh.actors.state.opening import SECRET
from expertmesh.actors.state.settings import StateSettings


class Kernels(Protocol):
    @property
    def mla_decode(self) -> Callable[..., Tensor]: ...


class Layered(Protocol):
    """What is needed of a Model."""

    @property
    def attention(self) -> Sequence[Any]: ...

    @property
    def kernels(self) -> Kernels: ...


def spill_of(settings: StateSettings, layout: StateLayout, device: torch.device) -> Spill | None:
    """None where the settings name no disk for old pages. A folder that cannot be used is told by
    the first write. layout: of the model's state."""
    if settings.disk is None or not settings.offload_disk_bytes:
        return None
    layers, tokens, width = layout.page
    shape = Shape(layers, tokens, width, layout.dtype)
    secret = os.environ.get(SECRET, "").encode() or None
    pinned = device.type == "cuda"
    return Spill(settings.disk, shape, settings.read_timeout_s, secret, pinned=pinned)


def offload_of(model: Layered, settings: StateSettings, **options: Any) -> Offload | None:
    """None for a model without MLA layers. What its queries look like is worked out from the
    weights when the first context asks. options: of Offload."""
    layers = [layer for layer in model.attention if isinstance(layer, Mla)]
    if not layers:
        return None

    @cache
    def moments() -> list[Tensor]:
        return [layer.query_moment() for layer in layers]

    return Offload(
        settings, layers[0].rank, layers[0].scale, model.kernels.mla_decode, moments, **options
    )
