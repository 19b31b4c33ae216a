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
    tokenizer = Tokenizer.load(folder, config)
    return ServedModel(
        name=name or folder.resolve().name,
        root=str(folder),
        max_model_len=min(max_model_len or config.max_position, config.max_position),
        vocab_size=config.vocab_size,
        tokenizer=tokenizer,
        moe_layers=len(config.moe_layers),
        top_k=config.experts_per_token,
        family=config.family,
        layers=config.num_layers,
        experts=config.num_experts,
        eos=config.eos,
        longest_token=None if tokenizer is None else longest_token(tokenizer),
        limits=limits or Limits(),
    )


def longest_token(tokenizer: Tokenizer) -> int:
    """Bytes of the longest token that text can become."""
    text_ids = (token for token in range(tokenizer.size) if not tokenizer.is_special(token))
    return max(len(tokenizer.token_bytes(token)) for token in text_ids)
