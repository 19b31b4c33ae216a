"""Choice of kernel backend: one frozen record of callables."""

from collections.abc import Callable
from dataclasses import dataclass, fields
from importlib import import_module
from importlib.util import find_spec

import torch
from torch import Tensor

BACKENDS = ("auto", "torch", "reference")

_HOMES = {
    "pack_linear": "linear",
    "rms_norm": "norm",
    "gated_rms_norm": "norm",
    "attn_res_mix": "attn_res",
    "attn_res_mix_norm": "attn_res",
    "kda_decode": "kda",
    "kda_prefill": "kda",
    "mla_decode": "mla",
    "mla_prefill": "mla",
    "route": "latent_moe",
    "glu": "latent_moe",
    "experts_partial_sum": "latent_moe",
    "mxfp4_decode": "quant",
    "mxfp4_encode": "quant",
    "sample": "sampling",
    "log_probs": "sampling",
    "counter_uniform": "sampling",
}


@dataclass(frozen=True, slots=True)
class Kernels:
    """Every operator of the model, from one backend; signatures as in `<op>/torch_ops.py`."""

    backend: str
    pack_linear: Callable[[Tensor], Callable[[Tensor], Tensor]]
    rms_norm: Callable[..., Tensor]
    gated_rms_norm: Callable[..., Tensor]
    attn_res_mix: Callable[..., Tensor]
    attn_res_mix_norm: Callable[..., Tensor]
    kda_decode: Callable[..., Tensor]
    kda_prefill: Callable[..., Tensor]
    mla_decode: Callable[..., Tensor]
    mla_prefill: Callable[..., Tensor]
    route: Callable[..., tuple[Tensor, Tensor]]
    glu: Callable[..., Tensor]
    experts_partial_sum: Callable[..., Tensor]
    mxfp4_decode: Callable[..., Tensor]
    mxfp4_encode: Callable[..., tuple[Tensor, Tensor]]
    sample: Callable[..., Tensor]
    log_probs: Callable[..., Tensor]
    counter_uniform: Callable[[int, int], float]


def load_kernels(backend: str = "auto") -> Kernels:
    """Operators of `backend`: "torch" (fast), "reference" (readable); "auto" is "torch".

    Raises ValueError naming the choices.
    """
    if backend not in BACKENDS:
        raise ValueError(f"unknown kernel backend {backend!r}; choose one of {', '.join(BACKENDS)}")
    module = "reference" if backend == "reference" else "torch_ops"
    ops = {
        field.name: getattr(
            import_module(f"expertmesh.kernels.{_HOMES[field.name]}.{module}"), field.name
        )
        for field in fields(Kernels)
        if field.name in _HOMES
    }
    return Kernels(backend="reference" if backend == "reference" else "torch", **ops)


@dataclass(frozen=True, slots=True)
class OperatorSupport:
    """Whether `backend` can serve operator `name` here. reason: why not; empty where it can."""

    name: str
    backend: str
    reason: str = ""


def operator_support() -> list[OperatorSupport]:
    """Every operator with every backend, those of one operator together."""
    modules = {"reference": "reference", "torch": "torch_ops", "triton": "triton_ops"}
    return [
        OperatorSupport(name, backend, _why_not(name, backend, module))
        for name in _HOMES
        for backend, module in modules.items()
    ]


def _why_not(name: str, backend: str, module: str) -> str:
    full = f"expertmesh.kernels.{_HOMES[name]}.{module}"
    if find_spec(full) is None:
        return f"this version has no {backend} kernel for it"
    if backend == "triton" and find_spec("triton") is None:
        return "triton is not installed"
    if backend == "triton" and not torch.cuda.is_available():
        return "no CUDA device"
    try:
        found = hasattr(import_module(full), name)
    except Exception as error:  # of any kind: whoever asks wants to know, not to fail
        return f"{type(error).__name__}: {error}"
    return "" if found else f"this version has no {backend} kernel for it"
