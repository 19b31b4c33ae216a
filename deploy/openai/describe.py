"""A checkpoint folder as the front door describes it to clients."""

from pathlib import Path

from expertmesh.actors.model.config import ModelConfig
from expertmesh.actors.model.tokenizer import Tokenizer
from expertmesh.deploy.openai.served import Limits, ServedModel


def describe(
    folder: Path,
    config: ModelConfig,
    *,
    name: str | None = None,
    max_model_len: int | None = None,
    limits: Limits | None = None,
) -> ServedModel:
    """name: default is the folder's name. max_model_len: at most, and by default, the model's own.

    Raises TokenizerError when the tokenizer files are broken; absent ones are allowed.
    """
    return ServedModel(
        name=name or folder.resolve().name,
        root=str(folder),
        max_model_len=min(max_model_len or config.max_position, config.max_position),
        vocab_size=config.vocab_size,
        tokenizer=Tokenizer.load(folder, config),
        moe_layers=len(config.moe_layers),
        top_k=config.experts_per_token,
        limits=limits or Limits(),
    )
