"""Choice of kernel backend: one frozen record of callables."""

from collections.abc import Callable
from dataclasses import dataclass, fields
from importlib import import_module

from torch import Tensor

BACKENDS = ("auto", "torch", "reference")

_HOMES = {
    "pack_linear": "linear",
    "rms_norm": "norm",
    "gated_rms_norm": "norm",
    "attn_res_mix": "attn_res",
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
