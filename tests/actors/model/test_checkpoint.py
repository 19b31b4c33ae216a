"""What the files hold against what the config asks for, and what is read (C3 C6 C8 C9 C10 C11)."""

import logging
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from expertmesh.actors.model.checkpoint import Checkpoint, CheckpointError, PackedMatrix
from expertmesh.actors.model.config import load_config, parse_config
from expertmesh.actors.model.validate import claims_packed
from tests.support.checkpoints import QUANTIZATION, config_dict, decode_mxfp4, write_checkpoint
from tests.support.golden import GOLDEN
from tests.support.tampering import Change, change_json, change_tensors, replace, shards_of

EXPERT = "layers.2.block_sparse_moe.experts.3."


@pytest.fixture(scope="module")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("pristine"), shards=2)


@pytest.fixture
def folder(pristine: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(pristine, tmp_path / "copy"))


def opened(folder: Path) -> Checkpoint:
    return Checkpoint.open(folder, load_config(folder))


def refused(folder: Path, *needles: str) -> str:
    with pytest.raises(CheckpointError) as caught:
        opened(folder)
    message = str(caught.value)
    for needle in needles:
        assert needle in message, message
    return message


def set_text(folder: Path, **keys: Any) -> None:
    change_json(folder / "config.json", lambda raw: raw["text_config"].update(keys))


# --- the whole set of tensors (C3) ---------------------------------------------------------------


@pytest.mark.parametrize("name", ["kimi_k3-tiny", "kimi_linear-tiny"])
def test_golden_checkpoints_open(name: str) -> None:
    checkpoint = opened(GOLDEN / name)
    stored: dict[str, torch.Tensor] = {}
    for path in shards_of(GOLDEN / name):
        stored |= load_file(path)
    prefix = checkpoint.config.tensor_prefix
    for tensor_name in checkpoint.names_for_attention():
        if not tensor_name.endswith("A_log"):
            assert torch.equal(checkpoint.tensor(tensor_name), stored[prefix + tensor_name])
    assert sum(checkpoint.summary().tensors_by_dtype.values()) == len(stored)


def test_more_layers_than_the_file_has(folder: Path) -> None:
    linear = config_dict(num_hidden_layers=7)["text_config"]["linear_attn_config"]
    linear |= {"kda_layers": [1, 2, 3, 5, 7], "full_attn_layers": [4, 6]}
    set_text(folder, num_hidden_layers=7, linear_attn_config=linear)
    message = refused(folder, "model.layers.6.input_layernorm.weight is missing", "and ", " more")
    assert len(message) < 2500


def test_fewer_layers_than_the_file_has(folder: Path) -> None:
    linear = config_dict()["text_config"]["linear_attn_config"]
    linear |= {"kda_layers": [1, 2, 3, 5], "full_attn_layers": [4]}
    set_text(folder, num_hidden_layers=5, linear_attn_config=linear)
    refused(folder, "not asked for by the config", "language_model.model.layers.5.")


def test_more_experts_than_the_file_has(folder: Path) -> None:
    set_text(folder, num_experts=16)
    refused(
        folder, "experts.8.w1.weight_packed is missing", "gate.weight in", "[8, 64]", "[16, 64]"
    )


def test_fewer_experts_than_the_file_has(folder: Path) -> None:
    set_text(folder, num_experts=7)
    refused(folder, "experts.7.w1.weight_packed", "not asked for")


@pytest.mark.parametrize(
    "name",
    ["layers.1.self_attn.k_conv1d.weight", "layers.0.self_attn.A_log", "model.norm.weight",
     "layers.1.block_sparse_moe.gate.e_score_correction_bias", f"{EXPERT}w2.weight_scale",
     f"{EXPERT}w2.weight_packed", "lm_head.weight", "layers.3.self_attn.kv_b_proj.weight",
     "output_attn_res_proj.weight", "layers.4.block_sparse_moe.routed_expert_norm.weight"],
)  # fmt: skip
def test_one_missing_tensor_is_named(folder: Path, name: str) -> None:
    change_tensors(folder, replace(name, lambda t: None))
    refused(folder, "1 missing: language_model.", name)


@pytest.mark.parametrize("name", ["language_model.model.layers.1.self_attn.extra.weight", "other"])
def test_an_unknown_tensor_is_named(folder: Path, name: str) -> None:
    def add(tensors: dict[str, torch.Tensor]) -> None:
        if any(key.endswith("lm_head.weight") for key in tensors):
            tensors[name] = torch.zeros(2)

    change_tensors(folder, add)
    refused(folder, "1 not asked for by the config", name, ".safetensors")


def test_parts_outside_the_text_model_are_skipped(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def add(tensors: dict[str, torch.Tensor]) -> None:
        if any(key.endswith("lm_head.weight") for key in tensors):
            tensors["vision_tower.blocks.0.w.weight"] = torch.zeros(2, dtype=torch.float16)
            tensors["mm_projector.proj.0.weight"] = torch.zeros(2)
            tensors["language_model.model.layers.6.eh_proj.weight"] = torch.zeros(2)

    change_tensors(folder, add)
    refused(folder, "layers.6.eh_proj")
    set_text(folder, num_nextn_predict_layers=1)
    with caplog.at_level(logging.INFO):
        checkpoint = opened(folder)
    lines = [r.getMessage() for r in caplog.records if "not used by the text" in r.getMessage()]
    assert len(lines) == 1
    assert checkpoint.summary().ignored.tensors == {"F16": 1, "F32": 2}


WRONG: list[tuple[str, Change, list[str]]] = [
    ("shape", replace("1.self_attn.q_proj.weight", lambda t: t[:-1]), ["[63, 64]", "[64, 64]"]),
    ("transposed", replace("layers.0.mlp.up_proj.weight", lambda t: t.T), ["[64, 128]"]),
    ("rank", replace("q_conv1d.weight", lambda t: t.squeeze(1)), ["[64, 4]", "[64, 1, 4]"]),
    ("half", replace("model.norm.weight", lambda t: t.half()), ["F16", "BF16 or F32"]),
    ("bf16 A_log", replace("A_log", lambda t: t.bfloat16()), ["BF16", "expected F32"]),
    ("bf16 dt_bias", replace("dt_bias", lambda t: t.bfloat16()), ["BF16", "expected F32"]),
    ("bf16 conv", replace("v_conv1d.weight", lambda t: t.bfloat16()), ["expected F32"]),
    ("bf16 bias", replace("correction_bias", lambda t: t.bfloat16()), ["expected F32"]),
    ("vocabulary", replace("lm_head.weight", lambda t: t[:300]), ["[300, 64]", "[320, 64]"]),
]


@pytest.mark.parametrize(("what", "change", "needles"), WRONG, ids=[w[0] for w in WRONG])
def test_wrong_shape_or_dtype_is_named(
    folder: Path, what: str, change: Change, needles: list[str]
) -> None:
    change_tensors(folder, change)
    refused(folder, "wrong: language_model.", ".safetensors", *needles)


def test_float32_stands_for_bf16(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path, dtype=torch.float32)
    assert opened(folder).tensor("lm_head.weight").dtype == torch.float32


def test_many_findings_are_cut_to_ten_and_a_count(folder: Path) -> None:
    change_tensors(folder, replace(".weight", lambda t: None))
    message = refused(folder, " more")
    assert len(message) < 2500


def test_the_other_prefix(folder: Path) -> None:
    def strip(tensors: dict[str, torch.Tensor]) -> None:
        for name in list(tensors):
            tensors[name.removeprefix("language_model.")] = tensors.pop(name)

    change_tensors(folder, strip)
    opened(folder)  # the prefix is optional: the names behind it are the same


# --- experts: layouts, scales (C6 C8 C9) ---------------------------------------------------------


def dense(matrix: PackedMatrix | torch.Tensor) -> torch.Tensor:
    if isinstance(matrix, PackedMatrix):
        return torch.from_numpy(decode_mxfp4(matrix.packed.numpy(), matrix.scale.numpy()))
    return matrix.float()


def test_each_storage_of_the_experts_holds_the_same_weights(tmp_path: Path) -> None:
    found = []
    for storage in ("packed", "bf16", "mixed"):
        folder = write_checkpoint(tmp_path / storage, experts=storage, shards=3)
        checkpoint = opened(folder)
        layers = checkpoint.config.moe_layers
        experts = [checkpoint.expert(i, e) for i in layers for e in range(8)]
        found.append([dense(w) for x in experts for w in (x.w1, x.w2, x.w3)])
    assert all(
        torch.equal(a, b) for other in found[1:] for a, b in zip(found[0], other, strict=True)
    )


def test_stacked_experts_are_refused_by_name(folder: Path) -> None:
    def stack(tensors: dict[str, torch.Tensor]) -> None:
        for name in [n for n in tensors if ".experts." in n]:
            tensors.pop(name)
        base = "language_model.model.layers.1.block_sparse_moe.experts"
        if any(".layers.1." in name for name in tensors):
            tensors[f"{base}.gate_up_proj_packed"] = torch.zeros(8, 128, 16, dtype=torch.uint8)

    change_tensors(folder, stack)
    refused(folder, "gate_up_proj_packed", "stacked or fused experts are not read")


SCALES: list[tuple[str, Change, list[str]]] = [
    ("short", replace(f"{EXPERT}w2.weight_scale", lambda t: t[:, :-1]), ["[32, 1]", "[32, 2]"]),
    ("long", replace(f"{EXPERT}w2.weight_scale", lambda t: torch.cat([t, t], 1)), ["[32, 4]"]),
    ("transposed", replace(f"{EXPERT}w2.weight_scale", lambda t: t.T), ["[2, 32]", "[32, 2]"]),
    ("float", replace(f"{EXPERT}w2.weight_scale", lambda t: t.float()), ["F32", "expected U8"]),
    ("int8", replace(f"{EXPERT}w2.weight_scale", lambda t: t.to(torch.int8)), ["I8", "U8"]),
    ("packed", replace(f"{EXPERT}w1.weight_packed", lambda t: t[:, :-1]), ["[64, 15]", "[64, 16]"]),
]


@pytest.mark.parametrize(("what", "change", "needles"), SCALES, ids=[s[0] for s in SCALES])
def test_a_scale_that_does_not_fit(
    folder: Path, what: str, change: Change, needles: list[str]
) -> None:
    change_tensors(folder, change)
    message = refused(folder, EXPERT, *needles)
    if what in ("short", "long", "transposed"):
        assert "group size 32" in message


def test_both_storages_of_one_matrix_are_refused(folder: Path) -> None:
    def add(tensors: dict[str, torch.Tensor]) -> None:
        if f"language_model.model.{EXPERT}w1.weight_packed" in tensors:
            tensors[f"language_model.model.{EXPERT}w1.weight"] = torch.zeros(64, 32)

    change_tensors(folder, add)
    refused(folder, f"{EXPERT}w1.weight", "not asked for")


@pytest.mark.parametrize("shards", [2, 3])
def test_three_groups_across_shards(tmp_path: Path, shards: int) -> None:
    folder = write_checkpoint(
        tmp_path, shards=shards, moe_intermediate_size=96, routed_expert_hidden_size=160
    )
    expert = opened(folder).expert(2, 3)
    assert isinstance(expert.w2, PackedMatrix)
    assert expert.w2.scale.shape == (160, 3)
    assert dense(expert.w1).shape == (96, 160)


def test_a_width_that_groups_do_not_divide(folder: Path) -> None:
    set_text(folder, moe_intermediate_size=80)
    refused(folder, "moe_intermediate_size 80 is no multiple of the group size 32")


@pytest.mark.parametrize("matrix", ["w1", "w2", "w3"])
@pytest.mark.parametrize("read_mode", ["mmap", "sequential"])
def test_scale_byte_255_is_refused_when_its_expert_is_loaded(
    folder: Path, matrix: str, read_mode: Any
) -> None:
    def poison(scale: torch.Tensor) -> torch.Tensor:
        scale[5, -1] = 255
        return scale

    change_tensors(folder, replace(f"{EXPERT}{matrix}.weight_scale", poison))
    checkpoint = Checkpoint.open(folder, load_config(folder), read_mode=read_mode)
    checkpoint.expert(2, 2)
    column = 1 if matrix == "w2" else 0
    with pytest.raises(CheckpointError, match="scale byte 255") as caught:
        checkpoint.expert(2, 3)
    assert f"{EXPERT}{matrix}.weight_scale" in str(caught.value)
    assert f"[5, {column}]" in str(caught.value)
    assert ".safetensors" in str(caught.value)


def test_every_other_scale_byte_passes_unchanged(folder: Path) -> None:
    extremes = torch.tensor([0, 1, 126, 127, 128, 200, 253, 254], dtype=torch.uint8)

    def spread(scale: torch.Tensor) -> torch.Tensor:
        return extremes.repeat(scale.numel() // 8).view(scale.shape)

    change_tensors(folder, replace(f"{EXPERT}w1.weight_scale", spread))
    expert = opened(folder).expert(2, 3)
    assert isinstance(expert.w1, PackedMatrix)
    assert torch.equal(expert.w1.scale.flatten()[:8], extremes)


# --- config against files (C10) ------------------------------------------------------------------


def test_the_files_win_over_the_quantization_claim(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    claimed = write_checkpoint(tmp_path / "a", experts="bf16", quantization_config=QUANTIZATION)
    assert isinstance(opened(claimed).expert(1, 0).w1, torch.Tensor)
    unclaimed = write_checkpoint(tmp_path / "b", quantization_config=...)
    assert isinstance(opened(unclaimed).expert(1, 0).w1, PackedMatrix)
    lines = [r.getMessage() for r in caplog.records if "disagree" in r.getMessage()]
    assert len(lines) == 2
    assert all("layers.1.block_sparse_moe.experts.0.w1" in line for line in lines)


def test_agreement_is_silent(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    opened(folder)
    assert "disagree" not in caplog.text


@pytest.mark.parametrize(
    ("ignore", "packed"),
    [
        ([], True),
        (["re:.*self_attn.*", "re:.*shared_experts.*"], True),
        (["re:.*block_sparse_moe.*"], False),
        (["re:.*experts\\.\\d+\\.w1"], False),
        (["model.layers.1.block_sparse_moe.experts.0.w1"], False),
        (["language_model.model.layers.1.block_sparse_moe.experts.0.w1"], False),
        (["re:model\\.layers\\.1\\."], False),
        (["re:language_model\\.model\\.layers\\.1\\."], False),
        (["model.layers.1.block_sparse_moe.experts.0"], True),
        (["lm_head"], True),
    ],
)
def test_ignore_lists(ignore: list[str], packed: bool) -> None:
    raw = config_dict()
    claim = raw["text_config"]["quantization_config"] | {"ignore": ignore}
    config = parse_config(config_dict(quantization_config=claim))
    assert claims_packed(config, "model.layers.1.block_sparse_moe.experts.0.w1") is packed


# --- sizes that other loaders trip over (C11) ----------------------------------------------------


def test_896_experts(tmp_path: Path) -> None:
    folder = write_checkpoint(
        tmp_path, num_experts=896, num_experts_per_token=16, num_hidden_layers=2, hidden_size=32,
        moe_intermediate_size=32,
    )  # fmt: skip
    checkpoint = opened(folder)
    assert dense(checkpoint.expert(1, 895).w2).shape == (32, 32)
    assert checkpoint.summary().packed_matrices == 896 * 3


@pytest.mark.parametrize("form", ["padded", "flat", "4d"])
@pytest.mark.parametrize("family", ["kimi_k3", "kimi_linear"])
def test_a_log_comes_out_per_head(tmp_path: Path, form: Any, family: Any) -> None:
    linear = {"num_heads": 3, "head_dim": 16}
    folder = write_checkpoint(tmp_path, family=family, a_log=form, linear_attn_config=linear)
    a_log = opened(folder).tensor("model.layers.1.self_attn.A_log")
    assert a_log.shape == (3,)
    assert bool((a_log != 0).all())


@pytest.mark.parametrize(
    "make",
    [lambda t: torch.zeros(4, 16), lambda t: torch.zeros(64), lambda t: torch.zeros(3),
     lambda t: torch.zeros(1, 4), lambda t: torch.zeros(1, 1, 4, 16), lambda t: torch.zeros(129)],
)  # fmt: skip
def test_a_log_of_another_shape_is_refused(folder: Path, make: Any) -> None:
    change_tensors(folder, replace("layers.1.self_attn.A_log", make))
    refused(folder, "layers.1.self_attn.A_log", "[1, 1, 4, 1]")


def test_a_log_padding_must_be_zero(folder: Path) -> None:
    change_tensors(folder, replace("layers.1.self_attn.A_log", lambda t: torch.ones(8)))
    checkpoint = opened(folder)
    with pytest.raises(CheckpointError, match="not all zero padding"):
        checkpoint.tensor("model.layers.1.self_attn.A_log")


@settings(max_examples=25)
@given(
    st.fixed_dictionaries(
        {
            "family": st.sampled_from(["kimi_k3", "kimi_linear"]),
            "shards": st.integers(1, 5),
            "experts": st.sampled_from(["packed", "bf16", "mixed"]),
            "a_log": st.sampled_from(["padded", "flat", "4d"]),
            "num_experts": st.integers(1, 9),
            "vocab_size": st.sampled_from([321, 333]),
            "num_hidden_layers": st.integers(1, 9),
            "first_k_dense_replace": st.integers(0, 1),
            "num_shared_experts": st.integers(0, 2),
            "attn_res_block_size": st.sampled_from([None, 1, 3, 12]),
            "q_lora_rank": st.sampled_from([None, 24]),
            "linear_attn_config": st.fixed_dictionaries(
                {"num_heads": st.integers(1, 5), "use_full_rank_gate": st.booleans()}
            ),
        }
    )
)
def test_any_model_that_is_written_opens(
    tmp_path_factory: pytest.TempPathFactory, keys: dict[str, Any]
) -> None:
    folder = write_checkpoint(tmp_path_factory.mktemp("any"), num_experts_per_token=1, **keys)
    checkpoint = opened(folder)
    config = checkpoint.config
    names = checkpoint.names_for_attention()
    on_disk = checkpoint.nbytes(names)
    for layer in config.moe_layers:
        names_here = checkpoint.names_for_experts(layer, range(config.num_experts))
        on_disk += checkpoint.nbytes(names_here)
        assert checkpoint.expert(layer, config.num_experts - 1).nbytes > 0
    assert on_disk == checkpoint.summary().text_bytes
    shutil.rmtree(folder)
