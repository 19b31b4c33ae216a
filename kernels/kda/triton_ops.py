"""Kimi Delta Attention on a GPU: the operators' Triton kernels, by phase."""

from expertmesh.kernels.kda.triton_decode import kda_decode
from expertmesh.kernels.kda.triton_prefill import kda_prefill

__all__ = ["kda_decode", "kda_prefill"]
