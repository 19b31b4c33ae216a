"""From a model to what its contexts share."""

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, Protocol

from torch import Tensor

from expertmesh.actors.model.layers import Mla
from expertmesh.actors.state.offload.context import Offload
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


def offload_of(model: Layered, settings: StateSettings, **options: int) -> Offload | None:
    """None for a model without MLA layers. What its queries look like is worked out from the
    weights when the first context asks. options: of Offload, for tests."""
    layers = [layer for layer in model.attention if isinstance(layer, Mla)]
    if not layers:
        return None

    @cache
    def moments() -> list[Tensor]:
        return [layer.query_moment() for layer in layers]

    return Offload(
        settings, layers[0].rank, layers[0].scale, model.kernels.mla_decode, moments, **options
    )
