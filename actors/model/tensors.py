"""Which tensors a checkpoint of a given config holds: name, shape and dtypes (k3-model.md 3).

Names are without the family prefix (`language_model.` in K3). Pure: reads no file, so the real K3
can be sized from its config alone.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod

from expertmesh.actors.model.config import ModelConfig

DTYPE_BYTES = {"F32": 4, "BF16": 2, "U8": 1}
GROUP_SIZE = 32  # mxfp4: one scale byte per 32 elements along the input dimension
_EITHER = ("BF16", "F32")
_FLOAT32 = ("F32",)
_BYTES = ("U8",)


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One expected tensor. `dtypes[0]` is what the published checkpoints use."""

    name: str
    shape: tuple[int, ...]
    dtypes: tuple[str, ...] = _EITHER

    @property
    def nbytes(self) -> int:
        """Bytes in the published dtype."""
        return prod(self.shape) * DTYPE_BYTES[self.dtypes[0]]


def attention_part(config: ModelConfig) -> Iterator[TensorSpec]:
    """Everything but the routed experts: what an attention actor reads."""
    hidden = config.hidden_size
    yield TensorSpec("model.embed_tokens.weight", (config.vocab_size, hidden))
    for layer in range(config.num_layers):
        yield from attention_layer(config, layer)
    yield TensorSpec("model.norm.weight", (hidden,))
    if config.attn_res_block is not None:
        yield TensorSpec("model.output_attn_res_norm.weight", (hidden,))
        yield TensorSpec("model.output_attn_res_proj.weight", (1, hidden))
    yield TensorSpec("lm_head.weight", (config.vocab_size, hidden))


def attention_layer(config: ModelConfig, layer: int) -> Iterator[TensorSpec]:
    """Layer `layer` (0-based) without its routed experts."""
    prefix, hidden = f"model.layers.{layer}.", config.hidden_size
    yield TensorSpec(f"{prefix}input_layernorm.weight", (hidden,))
    yield TensorSpec(f"{prefix}post_attention_layernorm.weight", (hidden,))
    if config.attn_res_block is not None:
        for site in ("self_attention_res", "mlp_res"):
            yield TensorSpec(f"{prefix}{site}_norm.weight", (hidden,))
            yield TensorSpec(f"{prefix}{site}_proj.weight", (1, hidden))
    block = _kda if config.is_kda(layer) else _mla
    yield from block(config, f"{prefix}self_attn.")
    if config.is_moe(layer):
        yield from _moe_without_experts(config, f"{prefix}block_sparse_moe.")
    else:
        yield from _mlp(f"{prefix}mlp.", hidden, config.intermediate_size)


def _kda(config: ModelConfig, prefix: str) -> Iterator[TensorSpec]:
    hidden, heads, dim = config.hidden_size, config.kda_heads, config.kda_head_dim
    width = heads * dim
    # K3 keeps these in F32; the 48B family's published dtypes are not known for certain, so
    # bf16 is taken there too (they are widened at load).
    small = _FLOAT32 if config.family == "kimi_k3" else ("F32", "BF16")
    for kind in "qkv":
        yield TensorSpec(f"{prefix}{kind}_proj.weight", (width, hidden))
        yield TensorSpec(f"{prefix}{kind}_conv1d.weight", (width, 1, config.conv_kernel), small)
    yield TensorSpec(f"{prefix}f_a_proj.weight", (dim, hidden))
    yield TensorSpec(f"{prefix}f_b_proj.weight", (width, dim))
    # K3 stores 96 values padded with zeros to 128; see checkpoint.py for what is accepted.
    padded = -(-heads // 128) * 128
    a_log_shape = (padded,) if config.family == "kimi_k3" else (1, 1, heads, 1)
    yield TensorSpec(f"{prefix}A_log", a_log_shape, _FLOAT32)
    yield TensorSpec(f"{prefix}dt_bias", (width,), _FLOAT32)
    yield TensorSpec(f"{prefix}b_proj.weight", (heads, hidden))
    if config.full_rank_gate:
        yield TensorSpec(f"{prefix}g_proj.weight", (width, hidden))
    else:
        yield TensorSpec(f"{prefix}g_a_proj.weight", (dim, hidden))
        yield TensorSpec(f"{prefix}g_b_proj.weight", (width, dim))
    yield TensorSpec(f"{prefix}o_norm.weight", (dim,), small)
    yield TensorSpec(f"{prefix}o_proj.weight", (hidden, width))


def _mla(config: ModelConfig, prefix: str) -> Iterator[TensorSpec]:
    hidden, heads, rank = config.hidden_size, config.num_heads, config.kv_lora_rank
    q_width = heads * (config.qk_nope_head_dim + config.qk_rope_head_dim)
    v_width = heads * config.v_head_dim
    if config.q_lora_rank is None:
        yield TensorSpec(f"{prefix}q_proj.weight", (q_width, hidden))
    else:
        yield TensorSpec(f"{prefix}q_a_proj.weight", (config.q_lora_rank, hidden))
        yield TensorSpec(f"{prefix}q_a_layernorm.weight", (config.q_lora_rank,))
        yield TensorSpec(f"{prefix}q_b_proj.weight", (q_width, config.q_lora_rank))
    yield TensorSpec(f"{prefix}kv_a_proj_with_mqa.weight", (rank + config.qk_rope_head_dim, hidden))
    yield TensorSpec(f"{prefix}kv_a_layernorm.weight", (rank,))
    kv_width = heads * (config.qk_nope_head_dim + config.v_head_dim)
    yield TensorSpec(f"{prefix}kv_b_proj.weight", (kv_width, rank))
    if config.mla_output_gate:
        yield TensorSpec(f"{prefix}g_proj.weight", (v_width, hidden))
    yield TensorSpec(f"{prefix}o_proj.weight", (hidden, v_width))


def _mlp(prefix: str, hidden: int, width: int) -> Iterator[TensorSpec]:
    yield TensorSpec(f"{prefix}gate_proj.weight", (width, hidden))
    yield TensorSpec(f"{prefix}up_proj.weight", (width, hidden))
    yield TensorSpec(f"{prefix}down_proj.weight", (hidden, width))


def _moe_without_experts(config: ModelConfig, prefix: str) -> Iterator[TensorSpec]:
    hidden, latent = config.hidden_size, config.latent_size
    yield TensorSpec(f"{prefix}gate.weight", (config.num_experts, hidden))
    bias_dtypes = _FLOAT32 if config.family == "kimi_k3" else ("F32", "BF16")
    yield TensorSpec(f"{prefix}gate.e_score_correction_bias", (config.num_experts,), bias_dtypes)
    if config.has_latent:
        yield TensorSpec(f"{prefix}routed_expert_down_proj.weight", (latent, hidden))
        if config.latent_norm:
            yield TensorSpec(f"{prefix}routed_expert_norm.weight", (latent,))
        yield TensorSpec(f"{prefix}routed_expert_up_proj.weight", (hidden, latent))
    if config.num_shared_experts:
        width = config.num_shared_experts * config.moe_intermediate_size
        yield from _mlp(f"{prefix}shared_experts.", hidden, width)


def expert_prefix(layer: int, expert: int) -> str:
    """Name prefix of one routed expert, ending in a dot."""
    return f"model.layers.{layer}.block_sparse_moe.experts.{expert}."


def expert_shapes(config: ModelConfig) -> dict[str, tuple[int, int]]:
    """Logical [out, in] of the three matrices: w1 = gate, w2 = down, w3 = up."""
    inner, latent = config.moe_intermediate_size, config.latent_size
    return {"w1": (inner, latent), "w2": (latent, inner), "w3": (inner, latent)}


def expert_part(config: ModelConfig, layer: int, expert: int, packed: bool) -> Iterator[TensorSpec]:
    """One routed expert, as mxfp4 (`packed`, two U8 tensors per matrix) or as plain matrices."""
    prefix = expert_prefix(layer, expert)
    for name, (rows, columns) in expert_shapes(config).items():
        if packed:
            yield from packed_matrix(f"{prefix}{name}", rows, columns)
        else:
            yield TensorSpec(f"{prefix}{name}.weight", (rows, columns))


def packed_matrix(name: str, rows: int, columns: int) -> tuple[TensorSpec, TensorSpec]:
    """The code and scale tensors of an mxfp4 matrix [rows, columns]."""
    return (
        TensorSpec(f"{name}.weight_packed", (rows, columns // 2), _BYTES),
        TensorSpec(f"{name}.weight_scale", (rows, columns // GROUP_SIZE), _BYTES),
    )
