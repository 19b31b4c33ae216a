"""Golden checkpoints: tiny models in the published layout with expected logits, ids and experts."""

from pathlib import Path

GOLDEN = Path(__file__).resolve().parents[1] / "golden"
K3_CONFIG = GOLDEN / "kimi_k3-config.json"  # the published one, byte for byte
