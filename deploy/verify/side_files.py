"""Do config, generation config and tokenizer mean the same model: end ids, chat, lengths."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from expertmesh.actors.model import chat_im, chat_xtml
from expertmesh.actors.model.config import ConfigError, ModelConfig
from expertmesh.actors.model.config_file import read_json_object, token_ids
from expertmesh.actors.model.problems import Problem
from expertmesh.actors.model.tokenizer import CONFIG_FILE, MODEL_FILE, Tokenizer, TokenizerError
from expertmesh.deploy.verify.findings import Findings

GENERATION_FILE = "generation_config.json"


def check_side_files(folder: Path, config: ModelConfig, findings: Findings) -> None:
    """The config itself has been read without error."""
    findings.take("config", _end_ids(folder, config), "warning")
    findings.take("config", _lengths(folder, config), "warning")
    try:
        tokenizer = Tokenizer.load(folder, config)
    except TokenizerError as error:
        text = str(error).replace(f"{folder}/", "")
        findings.take("tokenizer", [Problem(text, text.split(":", 1)[0])])
        return
    if tokenizer is None:
        text = f"no {MODEL_FILE}: the server will take and give token ids only"
        findings.take("tokenizer", [Problem(text, MODEL_FILE, "", "a file", "nothing")], "warning")
        return
    findings.take("tokenizer", _tokenizer(config, tokenizer), "warning")


def _declared(raw: dict[str, Any], vocab_size: int) -> set[int]:
    text = raw.get("text_config")
    found = [raw.get("eos_token_id"), text.get("eos_token_id") if isinstance(text, dict) else None]
    return {one for value in found for one in token_ids("eos_token_id", value, vocab_size)}


def _end_ids(folder: Path, config: ModelConfig) -> Iterator[Problem]:
    """Any id that either file declares ends an answer; that they differ may still be a mistake."""
    if not config.eos:
        yield Problem(
            "no file declares an end id: answers end at their length limit only",
            "config.json", "", "eos_token_id", "none",
        )  # fmt: skip
    generation = _generation(folder)
    if generation is None:
        return
    here = _declared(read_json_object(folder / "config.json"), config.vocab_size)
    there = _declared(generation, config.vocab_size)
    if not (here <= there or there <= here):
        yield Problem(
            f"{GENERATION_FILE} ends answers at {sorted(there)}, config.json at {sorted(here)}; "
            "all of them will",
            GENERATION_FILE, "", str(sorted(here)), str(sorted(there)),
        )  # fmt: skip


def _lengths(folder: Path, config: ModelConfig) -> Iterator[Problem]:
    generation = _generation(folder) or {}
    length = generation.get("max_length")
    if isinstance(length, int) and length > config.max_position:
        yield Problem(
            f"{GENERATION_FILE}: max_length {length} is more than the model's "
            f"{config.max_position} positions",
            GENERATION_FILE, "", f"at most {config.max_position}", str(length),
        )  # fmt: skip


def _generation(folder: Path) -> dict[str, Any] | None:
    path = folder / GENERATION_FILE
    try:
        return read_json_object(path) if path.exists() else None
    except ConfigError:  # reading the config has told of it
        return None


def _tokenizer(config: ModelConfig, tokenizer: Tokenizer) -> Iterator[Problem]:
    for token in config.eos:
        if not tokenizer.is_special(token):
            text = tokenizer.token_text(token)
            yield Problem(
                f"end id {token} is the ordinary token {text!r}: answers will stop at that text",
                CONFIG_FILE, "", "a special token", repr(text),
            )  # fmt: skip
    if chat_xtml.has_markers(tokenizer):
        end = chat_xtml.END
    elif chat_im.has_markers(tokenizer):
        end = chat_im.END
    else:
        yield Problem(
            f"{CONFIG_FILE} names no chat markers ({chat_xtml.OPEN} and its like): chat requests "
            "will be refused",
            CONFIG_FILE, "", "the markers of a chat format", "none",
        )  # fmt: skip
        return
    if (found := tokenizer.special_id(end)) not in config.eos:
        yield Problem(
            f"{end} (id {found}), which ends a chat message, is no end id: turns will run on",
            CONFIG_FILE, "", f"{found} among {list(config.eos)}", "not there",
        )  # fmt: skip
