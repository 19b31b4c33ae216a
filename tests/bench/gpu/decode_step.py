"""A decode step of the engine's model between its exchanges: call by call, and as CUDA graphs.

The layers have K3's width: three KDA and one MLA layer, all with router, latent projections and
shared experts, and three sources of the residual where K3's last layers have nine. The experts are
elsewhere: what was sent comes back as their sum, so that only the attention half is timed.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tests.bench.gpu import stand_ins
from tests.bench.gpu.inputs import DeviceMake
from tests.bench.gpu.timers import Timer

ITEMS = ["64 rows, 4096 tokens", "8 rows, 4096 tokens", "1 row, 32768 tokens"]
PAGE = 64

K3 = {
    "family": "kimi_k3", "tensor_prefix": "language_model.", "vocab_size": 4096,
    "hidden_size": 7168, "num_layers": 4, "num_heads": 96, "intermediate_size": 33792,
    "rms_norm_eps": 1e-5, "glu_kind": "situ", "situ_beta": 4.0, "situ_linear_beta": 25.0,
    "q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64,
    "v_head_dim": 128, "mla_output_gate": True, "kda_heads": 96, "kda_head_dim": 128,
    "conv_kernel": 4, "gate_lower_bound": -5.0, "full_rank_gate": True,
    "kda_layers": frozenset({0, 1, 2}), "num_experts": 896, "experts_per_token": 16,
    "num_shared_experts": 2, "moe_intermediate_size": 3072, "latent_size": 3584,
    "has_latent": True, "latent_norm": True, "first_dense_layers": 0, "moe_layer_freq": 1,
    "renormalize": True, "routed_scaling": 1.0, "attn_res_block": 2, "max_position": 1 << 20,
    "bos": 0, "eos": (1,), "pad": None,
}  # fmt: skip
SMALL = K3 | {
    "vocab_size": 64, "hidden_size": 96, "num_heads": 2, "kda_heads": 2, "q_lora_rank": 32,
    "num_experts": 8, "experts_per_token": 2, "moe_intermediate_size": 32, "latent_size": 32,
    "num_layers": 2, "kda_layers": frozenset({0}), "attn_res_block": 1,
}  # fmt: skip


class RandomSource:
    """Tensors of any checkpoint of the configuration, drawn when they are asked for."""

    def __init__(self, config: Any, device: torch.device) -> None:
        from expertmesh.actors.model.tensors import attention_part

        self._make = DeviceMake(device, seed=1)
        self._shapes = {spec.name: spec.shape for spec in attention_part(config)}

    def tensor(self, name: str) -> Tensor:
        shape = self._shapes[name]
        if len(shape) == 1:  # norms, biases, decays: near one
            return self._make.randn(*shape, dtype=torch.float32, scale=0.1).add_(1.0)
        return self._make.randn(*shape, dtype=torch.float32, scale=shape[-1] ** -0.5)


class Echo:
    """An exchange whose experts give back what they are sent."""

    def begin_step(self, rows: int, micros: int = 1) -> None:
        pass

    def dispatch(
        self, layer: int, z_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor, micro: int = 0
    ) -> Tensor:
        return z_TD.float()

    def combine(self, pending: Tensor) -> Tensor:
        return pending

    def end_step(self) -> None:
        pass


def measure(item: str, device: torch.device, timer: Timer, small: bool) -> dict[str, Any]:
    """Times of the whole step both ways, what each asks of the device, and the largest difference
    of the logits from the same state: there should be none."""
    missing = stand_ins.install()
    from expertmesh.actors.model.batch import Batch, Span
    from expertmesh.actors.model.config import ModelConfig
    from expertmesh.actors.model.model import Model

    rows, context = (2, 70) if small else (int(item.split()[0]), int(item.split()[2]))
    dtype = torch.float32 if small else torch.bfloat16
    config = ModelConfig(**(SMALL if small else K3))
    kernels, graph_runner = _parts(device, small)
    source = RandomSource(config, device)
    model = Model(config, kernels, source, dtype=dtype, device=device, graphs="off")
    pages = -(-(context + 1) // PAGE)
    state = model.new_state(rows * pages, rows)
    spans = [
        Span(row, row, 1, context, list(range(row * pages, (row + 1) * pages)), True)
        for row in range(rows)
    ]
    batch = Batch(torch.arange(rows) % config.vocab_size, spans, torch.arange(rows))

    def step() -> Tensor:
        return model.forward(batch, state, Echo())

    start = [x.normal_(std=0.1).clone() for x in state.tensors()]
    exact = step().clone()
    eager = timer.call_us(step) | {"asked": asked_by(step, device)}
    model.runner = graph_runner(model)
    step()
    for tensor, value in zip(state.tensors(), start, strict=True):
        tensor.copy_(value)
    off, largest = float((step() - exact).abs().max()), float(exact.abs().max())
    # Another number of pages may split the context elsewhere, and rounds otherwise then.
    assert off <= 2.0**-5 * largest, f"logits of graphs off by {off} of {largest}"
    return {
        "layers": config.num_layers,
        "stand_ins": missing,
        "eager": eager,
        "graphs": timer.call_us(step) | {"asked": asked_by(step, device)},
        "largest_logit": largest,
        "largest_logit_difference": off,
    }


def _parts(device: torch.device, small: bool) -> tuple[Any, Callable[[Any], Any]]:
    """(kernels, model -> the runner that records). Without a GPU a tape stands for graphs."""
    from expertmesh.actors.model import graphs
    from expertmesh.actors.model.forward import EagerRunner
    from expertmesh.kernels.registry import load_kernels

    if not small:
        return load_kernels("auto", device.type), lambda model: graphs.runner_for(model, "on")
    from tests.support.graph_tape import Tape
    from tests.support.padded_kernels import padded_torch

    tape = Tape()
    return padded_torch(tape.opaque), lambda model: graphs.GraphRunner(
        model, EagerRunner(model, model.uploads), tape
    )


def asked_by(call: Any, device: torch.device) -> dict[str, int]:
    """What one call asks of the device: launches by the host, kernels that ran."""
    if device.type != "cuda":
        return {}
    from torch.profiler import ProfilerActivity, profile

    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as trace:
        call()
        torch.cuda.synchronize()
    by_host = {"cudaLaunchKernel", "cuLaunchKernel", "cuLaunchKernelEx", "cudaLaunchKernelExC"}
    events = trace.events() or []
    return {
        "launches": sum(event.name in by_host for event in events),
        "graphs": sum(event.name == "cudaGraphLaunch" for event in events),
        "kernels": sum(event.device_type.name == "CUDA" for event in events),
    }
