"""Write a trained model as a K3 checkpoint folder, and read such a folder back.

`python -m expertmesh.deploy.training.export --checkpoint FILE --work DIR --out FOLDER`
"""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from expertmesh.deploy.training import quant, tokenizer
from expertmesh.deploy.training.model import MLA, NanoConfig, NanoK3

PREFIX = "language_model."
FILE = "model-00001-of-000001.safetensors"
KEPT_FP32 = ("conv1d", "A_log", "dt_bias", "o_norm", "e_score_correction_bias")
CONTEXT = 8192


def checkpoint_names(model: NanoK3) -> dict[str, str]:
    """Our parameter name -> checkpoint name without prefix; stacked experts are left out."""
    names = {"lm_head": "lm_head.weight"}
    for ours in model.state_dict():
        if ours == "lm_head" or ours.rsplit(".", 1)[-1] in ("w1", "w2", "w3"):
            continue
        theirs = ours.replace("_res.norm", "_res_norm").replace("_res.proj", "_res_proj")
        if ".ffn." in theirs:
            dense = theirs.startswith("layers.0.")
            theirs = theirs.replace(".ffn.", ".mlp." if dense else ".block_sparse_moe.")
        theirs = theirs.replace("block_sparse_moe.e_score", "block_sparse_moe.gate.e_score")
        bare = theirs.endswith(("A_log", "dt_bias", "e_score_correction_bias"))
        names[ours] = f"model.{theirs}" if bare else f"model.{theirs}.weight"
    return names


def to_tensors(model: NanoK3) -> dict[str, Tensor]:
    """All checkpoint tensors: packed experts, a few fp32 tensors, the rest bf16."""
    state, tensors = model.state_dict(), {}
    for ours, theirs in checkpoint_names(model).items():
        value = state[ours].detach()
        wide = any(part in theirs for part in KEPT_FP32)
        tensors[PREFIX + theirs] = value.float() if wide else value.to(torch.bfloat16)
    for i, layer in enumerate(model.layers):
        for name in ("w1", "w2", "w3"):
            stack = getattr(layer.ffn, name, None)
            for e, weight in enumerate(stack if stack is not None else ()):
                base = f"{PREFIX}model.layers.{i}.block_sparse_moe.experts.{e}.{name}"
                packed, scale = quant.pack(weight.detach())
                tensors |= {f"{base}.weight_packed": packed, f"{base}.weight_scale": scale}
    return {name: value.contiguous().clone() for name, value in sorted(tensors.items())}


def from_tensors(cfg: NanoConfig, tensors: dict[str, Tensor]) -> NanoK3:
    """The model that a checkpoint holds, with its experts decoded to float32."""
    model = NanoK3(cfg)
    state = {
        ours: tensors[PREFIX + theirs].float() for ours, theirs in checkpoint_names(model).items()
    }
    for i, layer in enumerate(model.layers):
        for name in ("w1", "w2", "w3") if hasattr(layer.ffn, "w1") else ():
            base = f"{PREFIX}model.layers.{i}.block_sparse_moe.experts"
            state[f"layers.{i}.ffn.{name}"] = torch.stack(
                [
                    quant.unpack(
                        tensors[f"{base}.{e}.{name}.weight_packed"],
                        tensors[f"{base}.{e}.{name}.weight_scale"],
                    )
                    for e in range(cfg.experts)
                ]
            )
    model.load_state_dict(state)
    return model.eval()


def load_folder(folder: Path, cfg: NanoConfig | None = None) -> NanoK3:
    """Read every shard named in the index."""
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    tensors: dict[str, Tensor] = {}
    for shard in sorted(set(index["weight_map"].values())):
        tensors |= load_file(folder / shard)
    return from_tensors(cfg or NanoConfig(), tensors)


def text_config(model: NanoK3) -> dict[str, object]:
    cfg = model.cfg
    mla = [i + 1 for i, layer in enumerate(model.layers) if isinstance(layer.self_attn, MLA)]
    special = tokenizer.special_tokens()
    return {
        "architectures": ["KimiLinearForCausalLM"],
        "model_type": "kimi_linear",
        "vocab_size": cfg.vocab,
        "hidden_size": cfg.hidden,
        "num_hidden_layers": cfg.layers,
        "num_attention_heads": cfg.heads,
        "num_key_value_heads": cfg.heads,
        "intermediate_size": cfg.dense_width,
        "rms_norm_eps": cfg.eps,
        "hidden_act": "situ",
        "kv_lora_rank": cfg.kv_lora,
        "q_lora_rank": cfg.q_lora,
        "qk_nope_head_dim": cfg.nope,
        "qk_rope_head_dim": cfg.rope,
        "v_head_dim": cfg.v_dim,
        "mla_use_nope": True,
        "num_experts": cfg.experts,
        "num_experts_per_token": cfg.top_k,
        "num_shared_experts": 1,
        "moe_intermediate_size": cfg.expert_width,
        "moe_renormalize": True,
        "routed_scaling_factor": 1.0,
        "moe_router_activation_func": "sigmoid",
        "first_k_dense_replace": 1,
        "moe_layer_freq": 1,
        "use_grouped_topk": True,
        "num_expert_group": 1,
        "topk_group": 1,
        "tie_word_embeddings": False,
        "num_nextn_predict_layers": 0,
        "initializer_range": 0.02,
        "bos_token_id": special["[BOS]"],
        "eos_token_id": special["<|end_of_msg|>"],
        "pad_token_id": special["[PAD]"],
        "dtype": "bfloat16",
        "linear_attn_config": {
            "num_heads": cfg.heads,
            "head_dim": cfg.head_dim,
            "short_conv_kernel_size": 4,
            "kda_layers": [i for i in range(1, cfg.layers + 1) if i not in mla],
            "full_attn_layers": mla,
            "gate_lower_bound": cfg.lower_bound,
            "use_full_rank_gate": True,
        },
        "activation_situ_beta": cfg.beta_gate,
        "activation_situ_linear_beta": cfg.beta_up,
        "attn_res_block_size": cfg.block,
        "mla_use_output_gate": True,
        "topk_method": "noaux_tc",
        "routed_expert_hidden_size": cfg.latent,
        "latent_moe_use_norm": True,
        "max_position_embeddings": CONTEXT,
        "quantization_config": quantization_config(),
    }


def quantization_config() -> dict[str, object]:
    weights = {
        "num_bits": 4, "type": "float", "group_size": quant.BLOCK, "strategy": "group",
        "symmetric": True, "dynamic": False, "actorder": None, "block_structure": None,
        "observer": "minmax", "observer_kwargs": {}, "scale_dtype": "torch.uint8",
        "zp_dtype": None,
    }  # fmt: skip
    group = {
        "format": "mxfp4-pack-quantized", "targets": ["Linear"], "input_activations": None,
        "output_activations": None, "weights": weights,
    }  # fmt: skip
    ignore = [
        "re:.*self_attn.*", "re:.*shared_experts.*",
        "re:.*mlp\\.(gate|up|gate_up|down)_proj.*", "re:.*lm_head.*", "re:.*vision_tower.*",
        "re:.*mm_projector.*",
    ]  # fmt: skip
    return {
        "quant_method": "compressed-tensors", "format": "mxfp4-pack-quantized",
        "quantization_status": "compressed", "kv_cache_scheme": None,
        "global_compression_ratio": None, "ignore": ignore, "config_groups": {"group_0": group},
    }  # fmt: skip


def save_folder(model: NanoK3, work: Path, out: Path) -> None:
    """Write config, weights, index and tokenizer files; the model card is written by hand."""
    out.mkdir(parents=True, exist_ok=True)
    tensors = to_tensors(model)
    save_file(tensors, out / FILE, metadata={"format": "pt"})
    (out / FILE).chmod(0o644)  # safetensors writes it for the owner only
    size = sum(t.numel() * t.element_size() for t in tensors.values())
    index = {"metadata": {"total_size": size}, "weight_map": dict.fromkeys(tensors, FILE)}
    write_json(out / "model.safetensors.index.json", index)
    text = text_config(model)
    shared = ("bos_token_id", "eos_token_id", "pad_token_id", "dtype", "tie_word_embeddings")
    config = {
        "architectures": ["KimiK3ForConditionalGeneration"],
        "model_type": "kimi_k3",
        "text_config": text,
    } | {key: text[key] for key in shared}
    write_json(out / "config.json", config)
    special = tokenizer.special_tokens()
    stops = [special["<|end_of_msg|>"], special["[EOS]"]]
    write_json(out / "generation_config.json", {"max_length": CONTEXT, "eos_token_id": stops})
    for name in ("tiktoken.model", "tokenizer_config.json"):
        shutil.copyfile(work / name, out / name)


def write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--checkpoint", type=Path, required=True)
    parser.add_argument("--work", type=Path, required=True, help="folder with the tokenizer files")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    model = NanoK3(NanoConfig())
    model.load_state_dict(torch.load(args.checkpoint, weights_only=True)["model"])
    save_folder(model, args.work, args.out)
    reloaded = to_tensors(load_folder(args.out))
    written = to_tensors(model)
    assert all(torch.equal(reloaded[name], written[name]) for name in written)
    print(f"{len(written)} tensors, packing is stable under reload")


if __name__ == "__main__":
    main()
