"""Sizes from the config alone, against the published numbers of K3 (k3-model.md 3.2)."""

from pathlib import Path

import pytest

from expertmesh.actors.model.checkpoint import Checkpoint
from expertmesh.actors.model.config import load_config, parse_config
from expertmesh.actors.model.summary import expected_summary
from expertmesh.actors.model.tensors import attention_layer, attention_part, expert_part
from tests.support.checkpoints import config_dict, write_checkpoint
from tests.support.golden import K3_CONFIG

VISION_BYTES = 447_358_976 * 2  # 168 bf16 tensors that the text path ignores


@pytest.fixture(scope="module")
def k3():  # type: ignore[no-untyped-def]
    return load_config(K3_CONFIG)


def test_tensor_counts_of_k3(k3) -> None:  # type: ignore[no-untyped-def]
    summary = expected_summary(k3)
    assert summary.tensors_by_dtype == {"BF16": 1954, "F32": 506, "U8": 494_592}
    assert 1954 == 5 + 93 * 6 + 69 * 8 + 24 * 8 + 3 + 92 * 7
    assert summary.packed_matrices == 92 * 896 * 3


def test_bytes_of_k3(k3) -> None:  # type: ignore[no-untyped-def]
    summary = expected_summary(k3)
    assert summary.text_bytes + VISION_BYTES == 1_560_860_324_864
    assert summary.experts.total_bytes == 92 * 15_722_348_544
    assert summary.experts.total_bytes == 92 * 896 * 17_547_264
    assert round(summary.attention.total_bytes / 1e9, 2) == 113.51
    assert summary.attention.parameters + summary.experts.parameters == 2_779_484_478_208


@pytest.mark.parametrize(("layer", "nbytes"), [(4, 887_800_832), (3, 464_392_192)])
def test_bytes_of_one_attention_block_of_k3(k3, layer: int, nbytes: int) -> None:  # type: ignore[no-untyped-def]
    specs = [s for s in attention_layer(k3, layer) if ".self_attn." in s.name]
    assert sum(s.nbytes for s in specs) == nbytes


def test_names_and_shapes_of_k3_that_are_easy_to_get_wrong(k3) -> None:  # type: ignore[no-untyped-def]
    shapes = {s.name: s.shape for s in attention_part(k3)}
    shapes |= {s.name: s.shape for s in expert_part(k3, 92, 895, packed=True)}
    assert shapes["model.layers.0.self_attn.A_log"] == (128,)
    assert shapes["model.layers.92.self_attn.q_b_proj.weight"] == (18432, 1536)
    assert shapes["model.layers.3.self_attn.kv_a_proj_with_mqa.weight"] == (576, 7168)
    assert shapes["model.layers.3.self_attn.g_proj.weight"] == (12288, 7168)
    assert shapes["model.layers.0.mlp.down_proj.weight"] == (7168, 33792)
    moe = "model.layers.92.block_sparse_moe."
    assert shapes[f"{moe}shared_experts.gate_proj.weight"] == (6144, 7168)
    assert shapes[f"{moe}experts.895.w1.weight_packed"] == (3072, 1792)
    assert shapes[f"{moe}experts.895.w1.weight_scale"] == (3072, 112)
    assert shapes[f"{moe}experts.895.w2.weight_packed"] == (3584, 1536)
    assert shapes[f"{moe}experts.895.w2.weight_scale"] == (3584, 96)


@pytest.mark.parametrize("family", ["kimi_k3", "kimi_linear"])
def test_expected_and_found_agree(tmp_path: Path, family: str) -> None:
    folder = write_checkpoint(tmp_path, family=family, a_log="4d")  # type: ignore[arg-type]
    config = load_config(folder)
    found = Checkpoint.open(folder, config).summary()
    expected = expected_summary(config, packed=family == "kimi_k3")
    assert found.tensors_by_dtype == expected.tensors_by_dtype
    assert found.experts == expected.experts
    assert (found.packed_matrices, found.plain_matrices) == (
        expected.packed_matrices,
        expected.plain_matrices,
    )


def test_a_model_without_routed_experts() -> None:
    config = parse_config(config_dict(first_k_dense_replace=6))
    assert expected_summary(config).experts.total_bytes == 0
