"""The model's own config: what `config.json` of a K3 / Kimi-Linear checkpoint says, checked.

Two JSON layouts are read: K3's (`model_type: kimi_k3`, the text model under `text_config`) and the
flat one of the 48B family (`model_type: kimi_linear`). Key names, defaults and meaning follow the
published configs (moonshotai/Kimi-K3, moonshotai/Kimi-Linear-48B-A3B-Instruct). Everything that
would make the forward pass differ from what the weights were trained for is refused by key name.
"""

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, ValidationError, model_validator

from expertmesh.actors.model.config_file import (
    ConfigError,
    LinearAttention,
    TextConfig,
    describe_validation_error,
    read_json_object,
    token_ids,
)

__all__ = ["ConfigError", "ModelConfig", "Quantization", "load_config", "parse_config"]

_log = logging.getLogger(__name__)

# The fla / Triton chunk kernels factor exp(G_r - G_s) over 16 rows: 16 * 5 = 80 is the most an
# fp32 exponent can take (k3-model.md 2.2, "safe_gate"), so a lower bound below -5 would overflow.
MIN_GATE_LOWER_BOUND = -5.0

_WRAPPER_KEYS = {
    "architectures", "auto_map", "bos_token_id", "dtype", "torch_dtype", "eos_token_id",
    "ignore_index", "image_placeholder", "media_placeholder_token_id", "model_type",
    "pad_token_id", "quantization_config", "text_config", "tie_word_embeddings",
    "transformers_version", "vision_config",
}  # fmt: skip


class Quantization(BaseModel):
    """What `quantization_config` claims. The file decides (per tensor); this is only compared."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    group_size: Literal[32] = 32
    ignore: tuple[str, ...] = ()


class ModelConfig(BaseModel):
    """Shape and switches of the text model. Layer indices are 0-based everywhere in this class."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    family: Literal["kimi_k3", "kimi_linear"]
    tensor_prefix: str
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    intermediate_size: int
    rms_norm_eps: float
    glu_kind: Literal["situ", "silu"]
    situ_beta: float
    situ_linear_beta: float | None
    q_lora_rank: int | None
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    mla_output_gate: bool
    kda_heads: int
    kda_head_dim: int
    conv_kernel: int
    gate_lower_bound: float | None
    full_rank_gate: bool
    kda_layers: frozenset[int]
    num_experts: int
    experts_per_token: int
    num_shared_experts: int
    moe_intermediate_size: int
    latent_size: int
    has_latent: bool
    latent_norm: bool
    first_dense_layers: int
    moe_layer_freq: int
    renormalize: bool
    routed_scaling: float
    attn_res_block: int | None
    max_position: int
    bos: int | None
    eos: tuple[int, ...]
    pad: int | None
    mtp_layers: int = 0  # multi-token-prediction layers that the files may hold; never loaded
    quantization: Quantization | None = None

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        """Invariants that also bind a ModelConfig built in code, not from a file."""
        if not all(0 <= layer < self.num_layers for layer in self.kda_layers):
            raise ValueError("kda_layers must lie in 0..num_layers-1")
        if self.experts_per_token > self.num_experts:
            raise ValueError("experts_per_token exceeds num_experts")
        if not self.has_latent and self.latent_size != self.hidden_size:
            raise ValueError("without a latent projection latent_size is hidden_size")
        if any(not 0 <= token < self.vocab_size for token in self.eos):
            raise ValueError("an eos id lies outside the vocabulary")
        return self

    def is_kda(self, layer: int) -> bool:
        """Whether layer `layer` (0-based) is KDA; the others are MLA."""
        return layer in self.kda_layers

    def is_moe(self, layer: int) -> bool:
        """Whether layer `layer` (0-based) has routed experts; the others have a dense MLP."""
        return layer >= self.first_dense_layers and layer % self.moe_layer_freq == 0

    @property
    def mla_layers(self) -> tuple[int, ...]:
        """0-based indices of the MLA layers, ascending."""
        return tuple(i for i in range(self.num_layers) if i not in self.kda_layers)

    @property
    def moe_layers(self) -> tuple[int, ...]:
        """0-based indices of the layers with routed experts, ascending."""
        return tuple(i for i in range(self.num_layers) if self.is_moe(i))

    def kda_index(self, layer: int) -> int:
        """Position of KDA layer `layer` among the KDA layers (row of the state arrays)."""
        assert self.is_kda(layer), f"layer {layer} is not KDA"
        return sum(1 for other in self.kda_layers if other < layer)

    def mla_index(self, layer: int) -> int:
        """Position of MLA layer `layer` among the MLA layers (row of the latent cache)."""
        assert not self.is_kda(layer), f"layer {layer} is not MLA"
        return layer - sum(1 for other in self.kda_layers if other < layer)


def load_config(folder: str | Path) -> ModelConfig:
    """Read and check `config.json` (and `generation_config.json`, if there) of a checkpoint.

    `folder` may also be the path of a config JSON file itself. Raises ConfigError naming the file
    and the key.
    """
    path = Path(folder)
    if path.is_dir():
        path = path / "config.json"
    raw = read_json_object(path)
    generation_path = path.parent / "generation_config.json"
    generation = read_json_object(generation_path) if generation_path.exists() else {}
    try:
        return parse_config(raw, generation)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error


def parse_config(
    raw: Mapping[str, Any], generation: Mapping[str, Any] | None = None
) -> ModelConfig:
    """ModelConfig from the parsed JSON of `config.json` and `generation_config.json`.

    The end-of-text ids are the union of what the three places declare (config, its text_config,
    generation config), each an int, a list or null. Raises ConfigError naming the key.
    """
    model_type = raw.get("model_type")
    if model_type not in ("kimi_k3", "kimi_linear"):
        raise ConfigError(f"model_type: {model_type!r} is not one of kimi_k3, kimi_linear")
    nested = "text_config" in raw
    text_raw = raw["text_config"] if nested else raw
    if not isinstance(text_raw, Mapping):
        raise ConfigError("text_config: expected an object")
    where = "text_config." if nested else ""
    if nested and text_raw.get("model_type", "kimi_linear") != "kimi_linear":
        raise ConfigError(f"text_config.model_type: {text_raw['model_type']!r} is not kimi_linear")

    # The HF class hoists quantization_config, so both places occur in the wild.
    merged = dict(text_raw)
    if nested and "quantization_config" in raw:
        merged.setdefault("quantization_config", raw["quantization_config"])
    try:
        text = TextConfig.model_validate(merged)
    except ValidationError as error:
        raise ConfigError(describe_validation_error(error, where)) from None
    if nested and raw.get("tie_word_embeddings", False) is not False:
        raise ConfigError("tie_word_embeddings: tied embeddings are not supported")
    _log_unknown(raw, text_raw, nested)

    def declared_ids(key: str) -> list[int]:
        sources = [(f"{where}{key}", text_raw.get(key))]
        if nested:
            sources.insert(0, (key, raw.get(key)))
        sources.append((f"generation_config {key}", (generation or {}).get(key)))
        found = [i for name, value in sources for i in token_ids(name, value, text.vocab_size)]
        return list(dict.fromkeys(found))

    bos, pad = declared_ids("bos_token_id"), declared_ids("pad_token_id")
    linear = text.linear_attn_config
    has_latent = text.routed_expert_hidden_size is not None
    _refuse_contradictions(text, where)
    return ModelConfig(
        family=model_type,
        tensor_prefix="language_model." if model_type == "kimi_k3" else "",
        vocab_size=text.vocab_size,
        hidden_size=text.hidden_size,
        num_layers=text.num_hidden_layers,
        num_heads=text.num_attention_heads,
        intermediate_size=text.intermediate_size,
        rms_norm_eps=text.rms_norm_eps,
        glu_kind=text.hidden_act,
        situ_beta=1.0 if text.activation_situ_beta is None else text.activation_situ_beta,
        situ_linear_beta=text.activation_situ_linear_beta,
        q_lora_rank=text.q_lora_rank,
        kv_lora_rank=text.kv_lora_rank,
        qk_nope_head_dim=text.qk_nope_head_dim,
        qk_rope_head_dim=text.qk_rope_head_dim,
        v_head_dim=text.v_head_dim,
        mla_output_gate=text.mla_use_output_gate,
        kda_heads=linear.num_heads,
        kda_head_dim=linear.head_dim,
        conv_kernel=linear.short_conv_kernel_size,
        gate_lower_bound=_gate_lower_bound(linear, where),
        full_rank_gate=linear.use_full_rank_gate,
        kda_layers=_kda_layers(linear, text.num_hidden_layers, where),
        num_experts=text.num_experts,
        experts_per_token=text.num_experts_per_token,
        num_shared_experts=text.num_shared_experts,
        moe_intermediate_size=text.moe_intermediate_size,
        latent_size=text.routed_expert_hidden_size or text.hidden_size,
        has_latent=has_latent,
        latent_norm=text.latent_moe_use_norm,
        first_dense_layers=text.first_k_dense_replace,
        moe_layer_freq=text.moe_layer_freq,
        renormalize=text.moe_renormalize,
        routed_scaling=text.routed_scaling_factor,
        attn_res_block=text.attn_res_block_size,
        max_position=text.max_position,
        bos=bos[0] if bos else None,
        eos=tuple(declared_ids("eos_token_id")),
        pad=pad[0] if pad else None,
        mtp_layers=text.num_nextn_predict_layers or 0,
        quantization=_quantization(text, where),
    )


def _kda_layers(linear: LinearAttention, num_layers: int, where: str) -> frozenset[int]:
    """0-based KDA layers from the file's two 1-based lists, which must cover 1..n exactly once."""
    key = f"{where}linear_attn_config"
    both = linear.kda_layers + linear.full_attn_layers
    if 0 in both:
        raise ConfigError(f"{key}.kda_layers / full_attn_layers: layer 0 found, they count from 1")
    twice = sorted({i for i in both if both.count(i) > 1})
    if twice:
        raise ConfigError(f"{key}.kda_layers / full_attn_layers: layers {twice[:10]} named twice")
    outside = sorted(i for i in both if not 1 <= i <= num_layers)
    if outside:
        raise ConfigError(
            f"{key}.kda_layers / full_attn_layers: layers {outside[:10]} are outside "
            f"1..{num_layers} (num_hidden_layers)"
        )
    missing = sorted(set(range(1, num_layers + 1)) - set(both))
    if missing:
        raise ConfigError(f"{key}.kda_layers / full_attn_layers: layers {missing[:10]} in neither")
    return frozenset(i - 1 for i in linear.kda_layers)


def _refuse_contradictions(text: TextConfig, where: str) -> None:
    """Pairs of keys that are each fine but cannot both be meant."""
    if text.latent_moe_use_norm and text.routed_expert_hidden_size is None:
        raise ConfigError(f"{where}latent_moe_use_norm: needs routed_expert_hidden_size")
    if text.num_experts_per_token > text.num_experts:
        raise ConfigError(
            f"{where}num_experts_per_token: {text.num_experts_per_token} exceeds num_experts "
            f"{text.num_experts}"
        )
    if text.num_key_value_heads not in (None, text.num_attention_heads):
        raise ConfigError(
            f"{where}num_key_value_heads: {text.num_key_value_heads} differs from "
            f"num_attention_heads {text.num_attention_heads}"
        )
    if text.first_k_dense_replace > text.num_hidden_layers:
        raise ConfigError(
            f"{where}first_k_dense_replace: {text.first_k_dense_replace} exceeds "
            f"num_hidden_layers {text.num_hidden_layers}"
        )


def _gate_lower_bound(linear: LinearAttention, where: str) -> float | None:
    bound = linear.gate_lower_bound
    if bound is not None and not MIN_GATE_LOWER_BOUND <= bound < 0:
        raise ConfigError(
            f"{where}linear_attn_config.gate_lower_bound: {bound} is outside "
            f"[{MIN_GATE_LOWER_BOUND}, 0)"
        )
    return bound


def _quantization(text: TextConfig, where: str) -> Quantization | None:
    """The claim of `quantization_config`, refused unless it is mxfp4 with groups of 32."""
    claim = text.quantization_config
    if claim is None:
        return None
    key = f"{where}quantization_config"
    if claim.quant_method != "compressed-tensors" or claim.format != "mxfp4-pack-quantized":
        raise ConfigError(
            f"{key}: {claim.quant_method} / {claim.format} is not supported, only "
            "compressed-tensors / mxfp4-pack-quantized"
        )
    for name, group in claim.config_groups.items():
        expected = {"group_size": 32, "num_bits": 4, "type": "float", "symmetric": True}
        for field, value in expected.items():
            found = getattr(group.weights, field)
            if found != value:
                raise ConfigError(
                    f"{key}.config_groups.{name}.weights.{field}: {found!r} is not supported, "
                    f"expected {value!r}"
                )
    return Quantization(ignore=tuple(claim.ignore))


def _log_unknown(raw: Mapping[str, Any], text: Mapping[str, Any], nested: bool) -> None:
    """One line for every key that is read by nothing here (HF generation defaults, mostly)."""
    unknown = sorted(k for k in text if k not in TextConfig.known_keys() | _WRAPPER_KEYS)
    linear = text["linear_attn_config"]
    unknown += sorted(f"linear_attn_config.{k}" for k in set(linear) - LinearAttention.known_keys())
    if nested:
        unknown += sorted(k for k in raw if k not in _WRAPPER_KEYS)
    if unknown:
        _log.info("config: %d keys ignored: %s", len(unknown), ", ".join(unknown))
