"""Choice of kernel backend per operator: one frozen record of callables.

Model code calls `kernels.rms_norm(...)` and never asks who serves it.
"""

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from expertmesh.kernels.launch import interpreted

BACKENDS = ("triton", "torch", "reference")
E4M3_FROM = (8, 9)  # NVIDIA's compute capability
_MODULES = {"triton": "triton_ops", "torch": "torch_ops", "reference": "reference"}


@dataclass(frozen=True, slots=True)
class Operator:
    """home: its folder. without_triton: why it has no Triton kernel, where it has none. e4m3: its
    Triton kernel casts to or from FP8, which NVIDIA GPUs can from compute capability 8.9 on."""

    home: str
    without_triton: str = ""
    e4m3: bool = False


OPERATORS = {
    "pack_linear": Operator("linear", "a dense matmul: torch calls the vendor's library"),
    "rms_norm": Operator("norm"),
    "gated_rms_norm": Operator("norm"),
    "attn_res_mix": Operator("attn_res"),
    "attn_res_mix_norm": Operator("attn_res"),
    "kda_decode": Operator("kda"),
    "kda_prefill": Operator("kda"),
    "mla_plan": Operator("mla"),
    "mla_decode": Operator("mla"),
    "mla_prefill": Operator("mla", "torch's attention serves it"),
    "output_gate": Operator("mla"),
    "route": Operator("latent_moe"),
    "glu": Operator("latent_moe"),
    "experts_partial_sum": Operator("latent_moe"),
    "mxfp4_decode": Operator("quant"),
    "mxfp4_encode": Operator("quant", "weights are packed once, not while serving"),
    "fp8_encode": Operator("quant", e4m3=True),
    "fp8_decode": Operator("quant", e4m3=True),
    "sample": Operator("sampling"),
    "log_probs": Operator("sampling", "torch's log_softmax is one kernel"),
    "counter_uniform": Operator("sampling", "one number, drawn on the host"),
}


@dataclass(frozen=True, slots=True)
class Kernels:
    """Every operator of the model; signatures as in `<home>/torch_ops.py`. backend: as chosen."""

    backend: str
    pack_linear: Callable[[Tensor], Callable[[Tensor], Tensor]]
    rms_norm: Callable[..., Tensor]
    gated_rms_norm: Callable[..., Tensor]
    attn_res_mix: Callable[..., Tensor]
    attn_res_mix_norm: Callable[..., Tensor]
    kda_decode: Callable[..., Tensor]
    kda_prefill: Callable[..., Tensor]
    mla_plan: Callable[[Tensor, Tensor], Any]
    mla_decode: Callable[..., Tensor]
    mla_prefill: Callable[..., Tensor]
    output_gate: Callable[[Tensor, Tensor], Tensor]
    route: Callable[..., tuple[Tensor, Tensor]]
    glu: Callable[..., Tensor]
    experts_partial_sum: Callable[..., Tensor]
    mxfp4_decode: Callable[..., Tensor]
    mxfp4_encode: Callable[..., tuple[Tensor, Tensor]]
    fp8_encode: Callable[[Tensor], tuple[Tensor, Tensor]]
    fp8_decode: Callable[[Tensor, Tensor, torch.dtype], Tensor]
    sample: Callable[..., Tensor]
    log_probs: Callable[..., Tensor]
    counter_uniform: Callable[[int, int], float]


class KernelsUnavailable(ValueError):
    """A backend was asked for that cannot serve here, or that does not exist."""


def parse_choice(choice: str) -> tuple[str, dict[str, str]]:
    """ "auto,sample=torch" -> ("auto", {"sample": "torch"}): a backend, then operators that differ.

    Raises KernelsUnavailable naming what is unknown.
    """
    first, *rest = (part.strip() for part in choice.split(","))
    if "=" in first:
        raise KernelsUnavailable(f"a backend for all comes first, as in 'auto,{first}'")
    if first not in ("auto", *BACKENDS):
        known = ", ".join(("auto", *BACKENDS))
        raise KernelsUnavailable(f"unknown kernel backend {first!r}; choose one of {known}")
    chosen: dict[str, str] = {}
    for part in rest:
        name, _, backend = part.partition("=")
        if not name:
            raise KernelsUnavailable("a comma is followed by OPERATOR=BACKEND")
        if name not in OPERATORS:
            raise KernelsUnavailable(f"unknown operator {name!r}; there are {', '.join(OPERATORS)}")
        if backend not in BACKENDS:
            raise KernelsUnavailable(
                f"{name}: unknown kernel backend {backend!r}; choose one of {', '.join(BACKENDS)}"
            )
        if chosen.setdefault(name, backend) != backend:
            raise KernelsUnavailable(f"{name}: both {chosen[name]} and {backend}")
    return first, chosen


def resolve(choice: str, device_type: str, dtype: torch.dtype = torch.float32) -> dict[str, str]:
    """Operator -> the backend that serves it, for a model in `dtype` on a device of this type
    ("cpu", "cuda").

    "auto" takes Triton on CUDA wherever it can serve, else torch. A backend that was asked for by
    name and cannot serve is refused; operators without a Triton kernel stay with torch under
    "triton". Raises KernelsUnavailable with the reason.
    """
    general, chosen = parse_choice(choice)
    served: dict[str, str] = {}
    for name, operator in OPERATORS.items():
        backend = chosen.get(name, general)
        if name not in chosen:
            if backend == "triton" and operator.without_triton:
                backend = "torch"
            elif backend == "auto":
                backend = _auto(name, device_type)
        reason = why_not(name, backend, device_type)
        if reason:
            raise KernelsUnavailable(f"{backend} cannot serve {name}: {reason}")
        served[name] = backend
    if interpreted() and "triton" in served.values() and dtype != torch.float32:
        # Silently: it takes the bits of such numbers for integers.
        raise KernelsUnavailable(f"Triton's interpreter computes wrongly in {dtype}: use float32")
    return served


def load_kernels(
    choice: str = "auto", device_type: str = "cpu", dtype: torch.dtype = torch.float32
) -> Kernels:
    """The operators as `resolve` deals them. Raises KernelsUnavailable."""
    functions = {
        name: getattr(_module(OPERATORS[name].home, backend), name)
        for name, backend in resolve(choice, device_type, dtype).items()
    }
    return Kernels(backend=choice, **functions)


def why_not(name: str, backend: str, device_type: str) -> str:
    """Why `backend` cannot serve operator `name` on a device of this type; empty if it can."""
    operator = OPERATORS[name]
    if backend == "triton":
        if operator.without_triton:
            return f"no Triton kernel: {operator.without_triton}"
        if find_spec("triton") is None:
            return "triton is not installed"
        if interpreted():
            if device_type != "cpu":
                return "TRITON_INTERPRET=1 is set: kernels run on the CPU alone"
        elif device_type != "cuda":
            return "Triton kernels run on a GPU (TRITON_INTERPRET=1 runs them slowly on the CPU)"
        elif not torch.cuda.is_available():
            return "no CUDA device"
        elif operator.e4m3 and _capability() < E4M3_FROM:
            return "E4M3 casts need compute capability 8.9"
    elif backend == "reference" and device_type != "cpu":
        return "the reference is for the CPU"
    try:
        found = hasattr(_module(operator.home, backend), name)
    except Exception as error:  # of any kind: whoever asks wants to know, not to fail
        return f"{type(error).__name__}: {error}"
    return "" if found else f"this version has no {backend} kernel for it"


@dataclass(frozen=True, slots=True)
class OperatorSupport:
    """Whether `backend` can serve operator `name` here. reason: why not; empty where it can.
    chosen: whether "auto" takes it."""

    name: str
    backend: str
    reason: str = ""
    chosen: bool = False


def operator_support(device_type: str = "cpu") -> list[OperatorSupport]:
    """Every operator with every backend, those of one operator together. Raises nothing: what
    "auto" takes may have a reason too."""
    return [
        OperatorSupport(
            name,
            backend,
            why_not(name, backend, device_type),
            _auto(name, device_type) == backend,
        )
        for name in OPERATORS
        for backend in reversed(BACKENDS)
    ]


def _auto(name: str, device_type: str) -> str:
    fast = device_type == "cuda" and not why_not(name, "triton", device_type)
    return "triton" if fast else "torch"


def _capability() -> tuple[int, int]:
    """Of the NVIDIA GPU in use; AMD's have their own numbers, and the casts."""
    return E4M3_FROM if torch.version.hip else torch.cuda.get_device_capability()


def _module(home: str, backend: str):  # type: ignore[no-untyped-def]
    return import_module(f"expertmesh.kernels.{home}.{_MODULES[backend]}")
