"""The JSON side of the model config: one typed field per key that affects inference.

Names and defaults are those of the published config classes (k3-model.md 1.2). A key without a
default is needed. Bounds are wide: they only stop values that cannot be meant (a negative width, a
million experts) before they size an allocation.
"""

import json
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AliasChoices, BaseModel, ConfigDict, Field, ValidationError

Width = Annotated[int, Field(ge=1, le=1 << 20)]
Count = Annotated[int, Field(ge=1, le=1 << 16)]
Positive = Annotated[float, Field(gt=0, le=1e6, allow_inf_nan=False)]
Layers = Annotated[int, Field(ge=1, le=4096)]


class ConfigError(ValueError):
    """A config file that cannot be served. The message names the key."""


class _Keys(BaseModel):
    # strict: "128" or 128.0 or true for an integer is a broken file, not something to convert.
    model_config = ConfigDict(frozen=True, extra="ignore", strict=True)

    @classmethod
    def known_keys(cls) -> set[str]:
        """Every JSON key that this class reads, aliases included."""
        keys = set(cls.model_fields)
        for field in cls.model_fields.values():
            if isinstance(field.validation_alias, AliasChoices):
                keys |= {str(choice) for choice in field.validation_alias.choices}
        return keys


class LinearAttention(_Keys):
    """`linear_attn_config`. The two layer lists count from 1, as in the published files."""

    num_heads: Count
    head_dim: Width
    short_conv_kernel_size: Annotated[int, Field(ge=1, le=64)]
    kda_layers: list[int]
    full_attn_layers: list[int]
    gate_lower_bound: Annotated[float, Field(allow_inf_nan=False)] | None = None
    use_full_rank_gate: bool = False


class GroupWeights(_Keys):
    """`config_groups.*.weights` of a compressed-tensors quantization config."""

    group_size: int | None
    num_bits: int
    type: str
    symmetric: bool = True


class QuantizationGroup(_Keys):
    """One entry of `config_groups`."""

    weights: GroupWeights


class QuantizationClaim(_Keys):
    """`quantization_config`."""

    quant_method: str
    format: str
    config_groups: dict[str, QuantizationGroup]
    ignore: list[str] = []


class TextConfig(_Keys):
    """The text model's keys. Unknown ones are ignored here and logged by the caller."""

    vocab_size: Annotated[int, Field(ge=2, le=1 << 24)]
    hidden_size: Width
    num_hidden_layers: Layers
    num_attention_heads: Count
    num_key_value_heads: int | None = None
    intermediate_size: Width
    hidden_act: Literal["situ", "silu"] = "silu"
    activation_situ_beta: Positive | None = None
    activation_situ_linear_beta: Positive | None = None
    rms_norm_eps: Annotated[float, Field(gt=0, le=0.1, allow_inf_nan=False)] = 1e-6
    max_position: Annotated[int, Field(ge=1, le=1 << 32)] = Field(
        validation_alias=AliasChoices("max_position_embeddings", "model_max_length")
    )
    q_lora_rank: Width | None = None
    kv_lora_rank: Width
    qk_nope_head_dim: Width
    qk_rope_head_dim: Width
    v_head_dim: Width
    # The class default is False (rotary keys); only the position-free form is implemented, so a
    # file has to say so.
    mla_use_nope: Literal[True]
    mla_use_output_gate: bool = False
    linear_attn_config: LinearAttention
    num_experts: Annotated[int, Field(ge=1, le=1 << 16)]
    num_experts_per_token: Count
    num_shared_experts: Annotated[int, Field(ge=0, le=1024)] = 0
    moe_intermediate_size: Width
    routed_expert_hidden_size: Width | None = None
    latent_moe_use_norm: bool = False
    first_k_dense_replace: Annotated[int, Field(ge=0, le=4096)]
    moe_layer_freq: Count = 1
    moe_router_activation_func: Literal["sigmoid"] = "sigmoid"
    topk_method: Literal["noaux_tc"] | None = None
    moe_renormalize: bool = True
    routed_scaling_factor: Positive = 1.0
    use_grouped_topk: bool = True
    num_expert_group: Literal[1] | None = 1
    topk_group: Literal[1] | None = 1
    attn_res_block_size: Layers | None = None
    num_nextn_predict_layers: Annotated[int, Field(ge=0, le=64)] | None = 0
    tie_word_embeddings: Literal[False] = False
    quantization_config: QuantizationClaim | None = None


def read_json_object(path: Path) -> dict[str, Any]:
    """The JSON object in `path`. Raises ConfigError naming the file and what is wrong with it."""
    try:
        parsed = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such file") from None
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror})") from None
    except (UnicodeDecodeError, ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: not valid JSON ({str(error)[:200]})") from None
    if not isinstance(parsed, dict):
        raise ConfigError(f"{path}: expected a JSON object, found {type(parsed).__name__}")
    return parsed


def describe_validation_error(error: ValidationError, prefix: str) -> str:
    """One line per wrong key, `prefix` before each; values are cut so that a huge one stays out."""
    lines = []
    for item in error.errors(include_url=False)[:10]:
        key = prefix + ".".join(str(part) for part in item["loc"])
        if item["type"] == "missing":
            lines.append(f"{key}: missing")
        else:
            lines.append(f"{key}: {item['msg']} (found {str(item['input'])[:80]})")
    left = error.error_count() - len(lines)
    return "; ".join(lines) + (f"; and {left} more" if left > 0 else "")


def token_ids(key: str, value: object, vocab_size: int) -> list[int]:
    """The ids in `value` (an int, a list of ints, or None). Raises ConfigError naming `key`."""
    if value is None:
        return []
    ids: list[int] = []
    for token in value if isinstance(value, list) else [value]:
        if isinstance(token, bool) or not isinstance(token, int):
            raise ConfigError(f"{key}: expected an integer, a list of integers or null")
        if not 0 <= token < vocab_size:
            raise ConfigError(f"{key}: {token} is outside 0..{vocab_size - 1} (vocab_size)")
        ids.append(token)
    return ids
