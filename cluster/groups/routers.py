"""The routers' weights of a checkpoint, as a prior for which experts belong together."""

import numpy as np
from numpy.typing import NDArray

from expertmesh.actors.model.loading import OpenModel


def router_weights(opened: OpenModel) -> dict[int, NDArray[np.float32]]:
    """MoE layer -> float32 [E, H]. Raises CheckpointError."""
    names = {i: f"model.layers.{i}.block_sparse_moe.gate.weight" for i in opened.config.moe_layers}
    return {layer: opened.source.tensor(name).float().numpy() for layer, name in names.items()}
