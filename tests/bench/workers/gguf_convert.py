"""Turn a K3 checkpoint into GGUF with llama.cpp's own converter, in the converter's environment:
`python gguf_convert.py LLAMA_CPP_TREE CHECKPOINT OUT.gguf f32|mxfp4`.

Everything outside the experts becomes F32. The experts become F32 (exact: llama.cpp then computes
what the other systems compute) or ggml's MXFP4, a repacking bit for bit whose matmul rounds the
activations to 8 bits. No tokenizer: the benchmark speaks token ids.
"""

import logging
import sys
from functools import partial
from pathlib import Path
from typing import Any

import torch

E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])


def decode(packed: Any, scale: Any) -> torch.Tensor:
    """float32 [rows, columns]: low nibble first, blocks of 32 columns per scale byte."""
    codes = packed()
    values = E2M1[torch.stack([codes & 15, codes >> 4], dim=-1).long()].reshape(len(codes), -1)
    return values * torch.exp2(scale().float() - 127).repeat_interleave(32, dim=1)


def unpack_experts(model: Any) -> None:
    """In place of the converter's repacking: lazily decoded float32 matrices."""
    tensors = model.model_tensors
    for name in [name for name in tensors if name.endswith(".weight_packed")]:
        base = name.removesuffix("_packed")
        tensors[base] = partial(decode, tensors.pop(name), tensors.pop(f"{base}_scale"))


def main(tree: str, checkpoint: str, out: str, storage: str) -> None:
    sys.path[:0] = [tree, f"{tree}/gguf-py"]
    import gguf
    from conversion.kimi_k3 import KimiK3Model

    logging.basicConfig(level=logging.WARNING)
    KimiK3Model.set_vocab = KimiK3Model._set_vocab_none
    if storage == "f32":
        KimiK3Model._is_mxfp4_packed = lambda self: False
        KimiK3Model.dequant_model = unpack_experts
    unfinished = Path(out).with_suffix(".unfinished")
    with torch.inference_mode():
        KimiK3Model(
            Path(checkpoint), gguf.LlamaFileType.ALL_F32, unfinished,
            eager=True, model_name="bench",
        ).write()  # fmt: skip
    unfinished.rename(out)


if __name__ == "__main__":
    main(*sys.argv[1:])
