"""config.json: both layouts, defaults, and one refusal per way to be wrong (C11, C13, C9, C3)."""

import copy
import json
import logging
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from expertmesh.actors.model.config import ConfigError, ModelConfig, load_config, parse_config
from tests.support.checkpoints import config_dict
from tests.support.golden import GOLDEN


def refused(raw: dict[str, Any], *needles: str) -> str:
    with pytest.raises(ConfigError) as caught:
        parse_config(raw)
    for needle in needles:
        assert needle in str(caught.value)
    return str(caught.value)


def test_published_k3_layout_is_read() -> None:
    text = config_dict()["text_config"]
    text |= {"num_hidden_layers": 93, "num_experts": 896, "num_experts_per_token": 16}
    full = [*range(4, 93, 4), 93]
    text["linear_attn_config"] |= {
        "full_attn_layers": full,
        "kda_layers": [i for i in range(1, 94) if i not in full],
    }
    config = parse_config(config_dict() | {"text_config": text})
    assert config.family == "kimi_k3"
    assert config.tensor_prefix == "language_model."
    assert config.mla_layers == (*range(3, 92, 4), 92)
    assert len(config.mla_layers) == 24
    assert len(config.kda_layers) == 69
    assert config.moe_layers == tuple(range(1, 93))
    assert (config.num_experts, config.experts_per_token) == (896, 16)


def test_the_published_file_itself() -> None:
    config = load_config(GOLDEN / "kimi_k3-config.json")
    assert config.hidden_size == 7168
    assert (config.glu_kind, config.situ_beta, config.situ_linear_beta) == ("situ", 4.0, 25.0)
    assert (config.latent_size, config.has_latent, config.latent_norm) == (3584, True, True)
    assert (config.bos, config.eos, config.pad) == (163584, (163586,), 163839)
    assert config.gate_lower_bound == -5.0
    assert config.attn_res_block == 12
    assert config.max_position == 1048576
    assert config.mla_layers[-2:] == (91, 92)


def test_layer_positions_are_dense_per_kind() -> None:
    config = parse_config(config_dict(num_hidden_layers=9))
    kda = [i for i in range(9) if config.is_kda(i)]
    assert [config.kda_index(i) for i in kda] == list(range(len(kda)))
    assert [config.mla_index(i) for i in config.mla_layers] == list(range(len(config.mla_layers)))


def test_flat_layout_and_its_defaults() -> None:
    config = parse_config(config_dict("kimi_linear"))
    assert (config.family, config.tensor_prefix) == ("kimi_linear", "")
    assert config.max_position == 4096  # from model_max_length
    assert not config.has_latent
    assert config.latent_size == config.hidden_size
    assert config.q_lora_rank is None
    assert config.gate_lower_bound is None
    assert config.attn_res_block is None
    assert config.quantization is None


def test_class_defaults_stand_in_for_missing_keys() -> None:
    gone = dict.fromkeys(
        ["hidden_act", "rms_norm_eps", "num_shared_experts", "routed_scaling_factor",
         "mla_use_output_gate", "attn_res_block_size", "routed_expert_hidden_size",
         "latent_moe_use_norm", "activation_situ_beta", "activation_situ_linear_beta"], ...,
    )  # fmt: skip
    linear = {"gate_lower_bound": ..., "use_full_rank_gate": ...}
    config = parse_config(config_dict("kimi_k3", linear_attn_config=linear, **gone))
    assert config.glu_kind == "silu"
    assert config.rms_norm_eps == 1e-6
    assert config.num_shared_experts == 0
    assert config.routed_scaling == 1.0
    assert not config.mla_output_gate
    assert config.attn_res_block is None
    assert (config.has_latent, config.latent_norm) == (False, False)
    assert (config.situ_beta, config.situ_linear_beta) == (1.0, None)
    assert config.gate_lower_bound is None
    assert not config.full_rank_gate


NEEDED = [
    "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size",
    "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "mla_use_nope",
    "linear_attn_config", "num_experts", "num_experts_per_token", "moe_intermediate_size",
    "first_k_dense_replace", "max_position_embeddings",
]  # fmt: skip


@pytest.mark.parametrize("key", NEEDED)
def test_a_missing_needed_key_is_named(key: str) -> None:
    raw = config_dict()
    del raw["text_config"][key]
    assert "missing" in refused(raw, f"text_config.{key}")


@pytest.mark.parametrize("key", ["num_heads", "head_dim", "kda_layers", "full_attn_layers"])
def test_a_missing_linear_attention_key_is_named(key: str) -> None:
    raw = config_dict()
    del raw["text_config"]["linear_attn_config"][key]
    refused(raw, f"text_config.linear_attn_config.{key}: missing")


WRONG: list[tuple[str, Any]] = [
    ("hidden_size", "128"), ("hidden_size", 128.0), ("hidden_size", True), ("hidden_size", None),
    ("hidden_size", 0), ("hidden_size", -7168), ("hidden_size", 1 << 40),
    ("num_hidden_layers", 0), ("num_hidden_layers", 1_000_000), ("vocab_size", 1),
    ("num_experts", 10_000_000), ("num_experts_per_token", 0), ("num_experts_per_token", 9),
    ("rms_norm_eps", 0), ("rms_norm_eps", "1e-5"), ("rms_norm_eps", float("nan")),
    ("hidden_act", "gelu"), ("moe_router_activation_func", "softmax"), ("topk_method", "greedy"),
    ("num_expert_group", 8), ("topk_group", 2), ("tie_word_embeddings", True),
    ("mla_use_nope", False), ("activation_situ_beta", 0.0), ("activation_situ_beta", -4),
    ("routed_scaling_factor", float("inf")), ("attn_res_block_size", 0), ("q_lora_rank", 0),
    ("first_k_dense_replace", -1), ("first_k_dense_replace", 99), ("moe_layer_freq", 0),
    ("num_key_value_heads", 2), ("linear_attn_config", [1]), ("linear_attn_config", None),
    ("eos_token_id", "2"), ("eos_token_id", 320), ("eos_token_id", [2, -1]),
    ("eos_token_id", [True]), ("eos_token_id", {"a": 1}), ("bos_token_id", 1.5),
    ("latent_moe_use_norm", 1), ("max_position_embeddings", 0),
]  # fmt: skip


@pytest.mark.parametrize(("key", "value"), WRONG, ids=[f"{k}={v!r}" for k, v in WRONG])
def test_a_wrong_value_is_refused_naming_the_key(key: str, value: Any) -> None:
    raw = config_dict()
    raw["text_config"][key] = value
    refused(raw, f"text_config.{key}")


@pytest.mark.parametrize("bound", [0.0, 1.0, -5.01, -1e9, float("nan"), "x"])
def test_gate_lower_bound_outside_the_kernels_range(bound: Any) -> None:
    raw = config_dict(linear_attn_config={"gate_lower_bound": bound})
    refused(raw, "linear_attn_config.gate_lower_bound")


@pytest.mark.parametrize(
    ("kda", "full", "what"),
    [
        ([0, 1, 2, 4], [3, 5], "count from 1"),
        ([1, 2, 3, 5], [4], "[6] in neither"),
        ([1, 2, 3, 4, 5], [4, 6], "[4] named twice"),
        ([1, 2, 2, 3, 5], [4, 6], "[2] named twice"),
        ([1, 2, 3, 5, 7], [4, 6], "[7] are outside 1..6"),
        ([1, 2, 3, -5], [4, 6], "[-5] are outside"),
        ([], [], "in neither"),
        ("123", [4], "kda_layers"),
        ([1, 2, 3, "5"], [4, 6], "kda_layers"),
    ],
)
def test_layer_lists_that_do_not_cover_each_layer_once(kda: Any, full: Any, what: str) -> None:
    linear = {"kda_layers": kda, "full_attn_layers": full}
    refused(config_dict(linear_attn_config=linear), "linear_attn_config.kda_layers", what)


@pytest.mark.parametrize("dense", [0, 1])
def test_dense_layers_at_the_start(dense: int) -> None:
    config = parse_config(config_dict(first_k_dense_replace=dense))
    assert config.moe_layers == tuple(range(dense, 6))


def quantization(**weights: Any) -> dict[str, Any]:
    claim = copy.deepcopy(config_dict()["text_config"]["quantization_config"])
    claim["config_groups"]["group_0"]["weights"] |= weights
    return claim


@pytest.mark.parametrize(
    ("key", "value"),
    [("group_size", 16), ("group_size", 64), ("group_size", None), ("num_bits", 8),
     ("type", "int"), ("symmetric", False)],
)  # fmt: skip
def test_another_quantization_is_refused(key: str, value: Any) -> None:
    raw = config_dict(quantization_config=quantization(**{key: value}))
    refused(raw, f"quantization_config.config_groups.group_0.weights.{key}")


def test_another_quantization_method_is_refused() -> None:
    claim = quantization() | {"quant_method": "gptq"}
    refused(config_dict(quantization_config=claim), "quantization_config", "gptq")


def test_quantization_config_at_the_top_level_is_found() -> None:
    raw = config_dict(quantization_config=...)
    raw["quantization_config"] = quantization(group_size=16)
    refused(raw, "group_size")
    raw["quantization_config"] = quantization()
    assert parse_config(raw).quantization is not None


def test_unknown_keys_are_ignored_with_one_line(caplog: pytest.LogCaptureFixture) -> None:
    raw = config_dict(frobnicate=1, zeta=[])
    raw["new_top_key"] = {}
    with caplog.at_level(logging.INFO):
        parse_config(raw)
    lines = [r.getMessage() for r in caplog.records if "ignored" in r.getMessage()]
    assert len(lines) == 1
    assert all(key in lines[0] for key in ("frobnicate", "zeta", "new_top_key"))


@pytest.mark.parametrize("model_type", [None, "llama", 7, "kimi_k2"])
def test_another_model_type_is_refused(model_type: Any) -> None:
    refused(config_dict() | {"model_type": model_type}, "model_type")


def test_contradictions() -> None:
    refused(config_dict(routed_expert_hidden_size=None), "latent_moe_use_norm")
    refused(config_dict() | {"tie_word_embeddings": True}, "tie_word_embeddings")
    refused(config_dict() | {"text_config": [1]}, "text_config")


def test_the_error_stays_short_for_a_huge_value() -> None:
    raw = config_dict(hidden_size="x" * 1_000_000)
    assert len(refused(raw, "hidden_size")) < 1000


class TestEndIds:
    """Any of the declared end ids stops (C13)."""

    def eos(self, tmp_path: Path, raw: dict[str, Any], generation: object = ...) -> tuple[int, ...]:
        (tmp_path / "config.json").write_text(json.dumps(raw))
        if generation is not ...:
            (tmp_path / "generation_config.json").write_text(json.dumps(generation))
        return load_config(tmp_path).eos

    def test_int_list_null_and_absent_in_config(self, tmp_path: Path) -> None:
        for value, expected in [(2, (2,)), ([5, 2, 5], (5, 2)), (None, ()), (..., ()), ([], ())]:
            raw = config_dict("kimi_linear", eos_token_id=value)
            assert self.eos(tmp_path, raw) == expected

    @pytest.mark.parametrize(
        ("value", "expected"),
        [({"eos_token_id": 7}, (2, 7)), ({"eos_token_id": [7, 2]}, (2, 7)), ({}, (2,)),
         ({"eos_token_id": None}, (2,))],
    )  # fmt: skip
    def test_generation_config_adds(
        self, tmp_path: Path, value: object, expected: tuple[int, ...]
    ) -> None:
        assert self.eos(tmp_path, config_dict(), value) == expected

    def test_both_levels_count(self, tmp_path: Path) -> None:
        raw = config_dict()
        raw["eos_token_id"] = 9
        assert self.eos(tmp_path, raw) == (9, 2)

    def test_missing_generation_config_falls_back(self, tmp_path: Path) -> None:
        assert self.eos(tmp_path, config_dict()) == (2,)

    def test_a_broken_one_is_named(self, tmp_path: Path) -> None:
        (tmp_path / "generation_config.json").write_text("{")
        with pytest.raises(ConfigError, match=r"generation_config\.json: not valid JSON"):
            self.eos(tmp_path, config_dict())
        with pytest.raises(ConfigError, match="generation_config eos_token_id"):
            self.eos(tmp_path, config_dict(), {"eos_token_id": 100_000})


@pytest.mark.parametrize(
    ("content", "what"),
    [("", "not valid JSON"), ("[1]", "expected a JSON object"), ("{", "not valid JSON"),
     ("[" * 100_000, "not valid JSON"), ("\ud800".encode("utf-16", "surrogatepass"), "not valid")],
)  # fmt: skip
def test_a_broken_file_is_named(tmp_path: Path, content: str | bytes, what: str) -> None:
    path = tmp_path / "config.json"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ConfigError, match=r"config\.json") as caught:
        load_config(tmp_path)
    assert what in str(caught.value)


def test_no_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no such file"):
        load_config(tmp_path)


def test_the_config_cannot_be_changed() -> None:
    config = parse_config(config_dict())
    with pytest.raises(ValueError, match="frozen"):
        config.hidden_size = 1  # type: ignore[misc]
    with pytest.raises(ValueError, match="nonsense"):
        ModelConfig(**(config.model_dump() | {"nonsense": 1}))
    assert ModelConfig(**config.model_dump()) == config


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=5,
)


@given(st.sampled_from(sorted(config_dict()["text_config"])), json_values)
def test_any_value_under_any_key_is_taken_or_refused_by_name(key: str, value: Any) -> None:
    raw = config_dict()
    raw["text_config"][key] = value
    try:
        parse_config(raw)
    except ConfigError as error:
        assert len(str(error)) < 3000


@given(st.dictionaries(st.text(max_size=12), json_values, max_size=4))
def test_any_object_is_refused_without_surprise(raw: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        parse_config(raw)


@given(st.integers(1, 40), st.data())
def test_any_partition_of_the_layers_is_taken(layers: int, data: st.DataObject) -> None:
    kda = data.draw(st.sets(st.integers(1, layers)))
    linear = {
        "kda_layers": sorted(kda),
        "full_attn_layers": sorted(set(range(1, layers + 1)) - kda),
    }
    config = parse_config(config_dict(num_hidden_layers=layers, linear_attn_config=linear))
    assert config.kda_layers == {i - 1 for i in kda}
    assert sorted([*config.kda_layers, *config.mla_layers]) == list(range(layers))
