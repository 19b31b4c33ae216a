"""The checkpoints that are measured: the bundled one and generated ones, written once and kept."""

import hashlib
import json
import os
import shutil
from pathlib import Path
from typing import Any

from tests.support.checkpoints import WIDE, write_checkpoint

ROOT = Path(__file__).resolve().parents[2]
NANO = ROOT / "deploy" / "models" / "nano"

# `kimi_linear-tiny` with every width times four and four times the experts.
LINEAR: dict[str, Any] = {
    "hidden_size": 512, "num_hidden_layers": 5, "num_attention_heads": 4, "intermediate_size": 768,
    "kv_lora_rank": 256, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
    "num_experts": 32, "num_experts_per_token": 4, "moe_intermediate_size": 256,
    "vocab_size": 1280, "linear_attn_config": {"num_heads": 4, "head_dim": 128},
}  # fmt: skip

# A few hundred kB: for the smoke tests of the benchmarks themselves.
TINY: dict[str, Any] = {"num_hidden_layers": 3, "vocab_size": 96}

GENERATED: dict[str, tuple[str, dict[str, Any]]] = {
    "wide": ("kimi_k3", WIDE),
    "linear": ("kimi_linear", LINEAR),
    "tiny": ("kimi_k3", TINY),
    "tiny-linear": ("kimi_linear", TINY),
}


def cache_folder() -> Path:
    """Where generated checkpoints and the peers' environments are kept between runs."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    folder = Path(base) / "expertmesh"
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def checkpoint(name: str) -> Path:
    """Folder of "nano", of a generated model by name, or the path itself. Raises ValueError."""
    if name == "nano":
        if not (NANO / "config.json").exists():
            raise ValueError(f"{NANO} holds no checkpoint; train and export it first")
        return NANO
    if name not in GENERATED:
        if (Path(name) / "config.json").exists():
            return Path(name)
        raise ValueError(f"no model {name!r}: nano, {', '.join(GENERATED)} or a checkpoint folder")
    family, sizes = GENERATED[name]
    written_by = (ROOT / "tests" / "support" / "checkpoints.py").read_text()
    key = hashlib.sha256((json.dumps(sizes) + written_by).encode()).hexdigest()[:10]
    folder = cache_folder() / f"bench-model-{name}-{key}"
    if not folder.exists():
        unfinished = folder.with_suffix(".unfinished")
        shutil.rmtree(unfinished, ignore_errors=True)
        write_checkpoint(unfinished, family=family, **sizes)  # type: ignore[arg-type]
        unfinished.rename(folder)
    return folder
