"""Router, gated activation and grouped experts as Triton kernels."""

from expertmesh.kernels.latent_moe.triton_experts import experts_partial_sum
from expertmesh.kernels.latent_moe.triton_glu import glu
from expertmesh.kernels.latent_moe.triton_route import route

__all__ = ["experts_partial_sum", "glu", "route"]
