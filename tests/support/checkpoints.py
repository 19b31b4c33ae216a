"""Random, well-scaled checkpoints of any size in the published layouts, for tests and benchmarks.

`write_checkpoint(folder)` writes config.json, the shards and their index. Weights depend on (seed,
tensor name) only: another number of shards or another storage of the experts gives the same model.
Experts are drawn as mxfp4, and `experts="bf16"` stores exactly the decoded values (every mxfp4
value fits bf16), so a packed and a bf16 checkpoint with one seed give the same logits.
"""

import json
import math
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor

from expertmesh.actors.model.config import ModelConfig, parse_config
from expertmesh.actors.model.tensors import (
    GROUP_SIZE,
    TensorSpec,
    attention_layer,
    attention_part,
    expert_prefix,
    expert_shapes,
)
from tests.support.tokenizer_files import SPECIAL_IDS, write_tokenizer

Experts = Literal["packed", "bf16", "mixed"]
ALog = Literal["padded", "flat", "4d"]

_E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)
_E2M1_STD = 2.926  # of a uniformly random code

QUANTIZATION: dict[str, Any] = {
    "quant_method": "compressed-tensors",
    "format": "mxfp4-pack-quantized",
    "quantization_status": "compressed",
    "kv_cache_scheme": None,
    "ignore": ["re:.*self_attn.*", "re:.*shared_experts.*", "re:.*lm_head.*",
               "re:.*mlp\\.(gate|up|gate_up|down)_proj.*"],
    "config_groups": {"group_0": {
        "format": "mxfp4-pack-quantized", "targets": ["Linear"],
        "input_activations": None, "output_activations": None,
        "weights": {"num_bits": 4, "type": "float", "group_size": 32, "strategy": "group",
                    "symmetric": True, "dynamic": False, "scale_dtype": "torch.uint8"},
    }},
}  # fmt: skip

_COMMON: dict[str, Any] = {
    "architectures": ["KimiLinearForCausalLM"], "model_type": "kimi_linear", "dtype": "bfloat16",
    "vocab_size": 320, "hidden_size": 64, "num_hidden_layers": 6, "num_attention_heads": 4,
    "intermediate_size": 128, "rms_norm_eps": 1e-5, "kv_lora_rank": 32, "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8, "v_head_dim": 16, "mla_use_nope": True, "num_experts": 8,
    "num_experts_per_token": 2, "moe_intermediate_size": 64, "moe_renormalize": True,
    "moe_router_activation_func": "sigmoid", "first_k_dense_replace": 1, "moe_layer_freq": 1,
    "use_grouped_topk": True, "num_expert_group": 1, "topk_group": 1,
    "tie_word_embeddings": False, "num_nextn_predict_layers": 0, "initializer_range": 0.02,
    "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
_FAMILY: dict[str, dict[str, Any]] = {
    "kimi_k3": {
        "hidden_act": "situ", "activation_situ_beta": 4.0, "activation_situ_linear_beta": 25.0,
        "q_lora_rank": 32, "mla_use_output_gate": True, "num_shared_experts": 2,
        "routed_expert_hidden_size": 32, "latent_moe_use_norm": True, "attn_res_block_size": 2,
        "routed_scaling_factor": 1.0, "topk_method": "noaux_tc", "max_position_embeddings": 4096,
    },
    "kimi_linear": {
        "hidden_act": "silu", "q_lora_rank": None, "num_shared_experts": 1,
        "routed_scaling_factor": 2.446, "model_max_length": 4096,
        "rope_theta": 10000.0, "rope_scaling": None,
    },
}  # fmt: skip
_LINEAR_ATTENTION: dict[str, dict[str, Any]] = {
    "kimi_k3": {"gate_lower_bound": -5.0, "use_full_rank_gate": True},
    "kimi_linear": {},
}

# A wide model for benchmarks: about 96 MB packed, written in a few seconds.
WIDE: dict[str, Any] = {
    "hidden_size": 1024, "routed_expert_hidden_size": 512, "num_hidden_layers": 8,
    "num_experts": 64, "num_experts_per_token": 8, "moe_intermediate_size": 256,
    "intermediate_size": 2048, "num_attention_heads": 8, "kv_lora_rank": 128, "q_lora_rank": 256,
    "qk_nope_head_dim": 64, "qk_rope_head_dim": 32, "v_head_dim": 64, "vocab_size": 2048,
    "attn_res_block_size": 4, "max_position_embeddings": 65536,
    "linear_attn_config": {"num_heads": 8, "head_dim": 64},
}  # fmt: skip


def config_dict(family: str = "kimi_k3", **overrides: Any) -> dict[str, Any]:
    """The content of config.json. `overrides` are HF text keys; a nested `linear_attn_config` is
    merged. Without layer lists every fourth layer and the last one are MLA, as in K3.
    A key set to `...` is left out.
    """
    text = _COMMON | _FAMILY[family]
    linear = {"num_heads": 4, "head_dim": 16, "short_conv_kernel_size": 4}
    linear |= _LINEAR_ATTENTION[family] | overrides.pop("linear_attn_config", {})
    packed = family == "kimi_k3"
    text |= {"quantization_config": QUANTIZATION} if packed else {}
    text |= overrides
    layers = text["num_hidden_layers"]
    mla = sorted({i for i in range(1, layers + 1) if i % 4 == 0} | {layers})
    linear.setdefault("full_attn_layers", mla)
    linear.setdefault(
        "kda_layers", [i for i in range(1, layers + 1) if i not in linear["full_attn_layers"]]
    )
    text["linear_attn_config"] = _without_ellipsis(linear)
    text.setdefault("num_key_value_heads", text["num_attention_heads"])
    text = _without_ellipsis(text)
    if family == "kimi_linear":
        return text
    ids = {k: text[k] for k in ("bos_token_id", "eos_token_id", "pad_token_id") if k in text}
    return {
        "architectures": ["KimiK3ForConditionalGeneration"],
        "model_type": "kimi_k3",
        "dtype": "bfloat16",
        "tie_word_embeddings": False,
        "text_config": text,
    } | ids


def write_checkpoint(
    folder: str | Path,
    *,
    family: Literal["kimi_k3", "kimi_linear"] = "kimi_k3",
    shards: int = 2,
    seed: int = 0,
    experts: Experts | None = None,
    a_log: ALog | None = None,
    dtype: torch.dtype = torch.bfloat16,
    tokenizer: bool = False,
    **overrides: Any,
) -> Path:
    """Write a random checkpoint and return its folder.

    shards: 1 writes `model.safetensors` without an index, more write indexed shards.
    experts: "packed" (K3's default), "bf16" (48B's), or "mixed" (odd experts bf16).
    a_log: "padded" [heads rounded up to 8, plus 4] (K3's default), "4d" [1,1,H,1] (48B's), "flat".
    dtype: of the tensors that K3 stores in bf16.
    tokenizer: also write a byte-level tiktoken.model with K3's specials (vocabulary 512).
    overrides: as in `config_dict`.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    if tokenizer:
        overrides = {"vocab_size": 512} | SPECIAL_IDS | overrides
        write_tokenizer(folder)
    experts = experts or ("packed" if family == "kimi_k3" else "bf16")
    claim = ... if experts == "bf16" else QUANTIZATION
    raw = config_dict(family, **({"quantization_config": claim} | overrides))
    (folder / "config.json").write_text(json.dumps(raw, indent=2))
    config = parse_config(raw)
    a_log = a_log or ("padded" if family == "kimi_k3" else "4d")
    tensors = dict(random_tensors(config, seed=seed, experts=experts, a_log=a_log, dtype=dtype))
    write_shards(folder, tensors, shards)
    return folder


def write_shards(folder: Path, tensors: dict[str, Tensor], shards: int) -> None:
    """Save `tensors` (full names) as `shards` files, cut in order at about equal bytes."""
    metadata = {"format": "pt"}
    if shards == 1:
        save_file(tensors, folder / "model.safetensors", metadata)
        return
    assert len(tensors) >= shards, "a shard needs a tensor"
    total = sum(tensor.nbytes for tensor in tensors.values())
    parts: list[dict[str, Tensor]] = [{}]
    done = 0
    for position, (name, tensor) in enumerate(tensors.items()):
        left = len(tensors) - position
        due = done * shards >= total * len(parts) or left == shards - len(parts)
        if parts[-1] and len(parts) < shards and due:
            parts.append({})
        parts[-1][name] = tensor
        done += tensor.nbytes
    weight_map = {}
    for number, part in enumerate(parts, 1):
        # The published pattern: five digits, then six.
        file = f"model-{number:05d}-of-{shards:06d}.safetensors"
        save_file(part, folder / file, metadata)
        weight_map |= dict.fromkeys(part, file)
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=1))


def random_tensors(
    config: ModelConfig,
    *,
    seed: int,
    experts: Experts = "packed",
    a_log: ALog = "padded",
    dtype: torch.dtype = torch.bfloat16,
) -> Iterator[tuple[str, Tensor]]:
    """All tensors of `config` with their full names, layer by layer."""
    in_layer = {s.name for i in range(config.num_layers) for s in attention_layer(config, i)}
    outside = [s for s in attention_part(config) if s.name not in in_layer]
    prefix = config.tensor_prefix
    for layer in range(config.num_layers):
        for spec in attention_layer(config, layer):
            yield prefix + spec.name, _attention_tensor(config, spec, seed, a_log, dtype)
        if config.is_moe(layer):
            for expert in range(config.num_experts):
                packed = experts == "packed" or (experts == "mixed" and expert % 2 == 0)
                for name, tensor in _expert(config, layer, expert, packed, seed, dtype):
                    yield prefix + name, tensor
    for spec in outside:
        yield prefix + spec.name, _attention_tensor(config, spec, seed, a_log, dtype)


def _attention_tensor(
    config: ModelConfig, spec: TensorSpec, seed: int, a_log: ALog, dtype: torch.dtype
) -> Tensor:
    """Scaled so that every block keeps activations near 1 and logits have std about 1."""
    if spec.name.endswith("A_log"):
        heads = config.kda_heads
        values = _normal(spec.name, (heads,), seed) * 0.5
        if a_log == "4d":
            return values.view(1, 1, heads, 1)
        padding = -heads % 8 + 4 if a_log == "padded" else 0
        return torch.cat([values, torch.zeros(padding)])
    normal = _normal(spec.name, spec.shape, seed)
    target = torch.float32 if spec.dtypes[0] == "F32" else dtype
    leaf = spec.name.removesuffix(".weight").rsplit(".", 1)[-1]
    if leaf == "dt_bias":
        values = normal * 1.5 - 3  # from a few tokens of memory to thousands
    elif leaf == "e_score_correction_bias":
        values = normal * 0.05
    elif leaf.endswith("conv1d"):
        values = normal * 0.5
    elif len(spec.shape) == 1:
        values = 1 + normal * 0.1  # norms
    elif leaf == "embed_tokens":
        values = normal
    else:
        values = normal / math.sqrt(spec.shape[-1])
    return values.to(target)


def _expert(
    config: ModelConfig, layer: int, expert: int, packed: bool, seed: int, dtype: torch.dtype
) -> Iterator[tuple[str, Tensor]]:
    for matrix, (rows, columns) in expert_shapes(config).items():
        name = f"{expert_prefix(layer, expert)}{matrix}"
        if columns % GROUP_SIZE:
            assert not packed, f"{name}: mxfp4 needs a multiple of {GROUP_SIZE} input columns"
            weight = _normal(name, (rows, columns), seed) / math.sqrt(columns)
            yield f"{name}.weight", weight.to(dtype)
            continue
        codes, scales = random_mxfp4(name, rows, columns, seed)
        if packed:
            yield f"{name}.weight_packed", torch.from_numpy(codes)
            yield f"{name}.weight_scale", torch.from_numpy(scales)
        else:
            yield f"{name}.weight", torch.from_numpy(decode_mxfp4(codes, scales)).to(dtype)


def random_mxfp4(
    name: str, rows: int, columns: int, seed: int
) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Codes [rows, columns/2] and scale bytes [rows, columns/32] with std about 1/sqrt(columns)."""
    rng = np.random.default_rng((seed, zlib.crc32(name.encode())))
    codes = rng.integers(0, 256, (rows, columns // 2), np.uint8)
    middle = 127 + round(math.log2(1 / (_E2M1_STD * math.sqrt(columns))))
    scales = rng.integers(middle - 1, middle + 2, (rows, columns // GROUP_SIZE), np.uint8)
    return codes, scales


def decode_mxfp4(codes: np.ndarray[Any, Any], scales: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """float32 [rows, columns]; low nibble first (k3-model.md 3.3). Independent of our kernels."""
    values = np.stack([_E2M1[codes & 15], _E2M1[codes >> 4]], -1).reshape(len(codes), -1)
    scale = np.exp2(scales.astype(np.float32) - 127)
    return values * np.repeat(scale, GROUP_SIZE, axis=1)


def _normal(name: str, shape: Sequence[int], seed: int) -> Tensor:
    rng = np.random.default_rng((seed, zlib.crc32(name.encode())))
    return torch.from_numpy(rng.standard_normal(tuple(shape), np.float32))


def _without_ellipsis(keys: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in keys.items() if value is not ...}
