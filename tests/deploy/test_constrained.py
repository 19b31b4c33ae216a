"""Constrained answers over a real engine with random weights: whatever such a model wants to say,
what comes out has the form that was asked for."""

import asyncio
import json
import re
import threading
from typing import Any

import httpx
import jsonschema
import openai
import pytest
from pydantic import BaseModel

from tests.deploy.test_chat import both as both_chat
from tests.deploy.test_completions import both
from tests.support.tokenizer_files import RANKS, SPECIALS
from tests.support.door import Door, chat_joined, joined

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
USER = [{"role": "user", "content": "hi"}]
OFF = {"chat_template_kwargs": {"thinking": False}}
MARKERS = {name: RANKS + offset for offset, name in SPECIALS.items()}
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "age": {"type": "integer", "minimum": 0, "maximum": 20_000_000_000},
        "城市": {"enum": ["北京", "Köln", 7, None]},
        "🌡": {"type": "array", "items": {"type": "boolean"}, "minItems": 1, "maxItems": 2},
    },
    "required": ["name", "age", "城市", "🌡"],
    "additionalProperties": False,
}


def schema_format(schema: Any, **more: Any) -> dict[str, Any]:
    holder = {"name": "x", "schema": schema} | more
    return {"response_format": {"type": "json_schema", "json_schema": holder}}


@pytest.mark.parametrize("seed", range(2))
def test_json_schema(real: Door, seed: int) -> None:
    body = schema_format(PERSON, strict=bool(seed % 2)) | {"max_tokens": 200, "seed": seed}
    choice, _ = both_chat(real, **body, **OFF)
    assert choice["finish_reason"] == "stop"
    jsonschema.validate(json.loads(choice["message"]["content"]), PERSON)
    plain, _ = both(real, "x", **body)
    assert plain["choices"][0]["finish_reason"] == "stop"
    jsonschema.validate(json.loads(plain["choices"][0]["text"]), PERSON)


def test_reasoning_stays_free(real: Door) -> None:
    """The model's own thought, token for token, until it closes it (which bias makes it do)."""
    structure = ("<|open|>", "<|close|>", "<|sep|>", "<|end_of_msg|>")
    no_markers = {str(MARKERS[name]): -100 for name in structure}
    body: dict[str, Any] = {"max_tokens": 12, "temperature": 0, "return_token_ids": True}
    free = real.chat(logit_bias=no_markers, **body)["choices"][0]
    body["structured_outputs"] = {"choice": ["yes", "no"]}
    bound = real.chat(logit_bias=no_markers, **body)["choices"][0]
    assert bound["token_ids"] == free["token_ids"] and bound["finish_reason"] == "length"
    assert bound["message"]["reasoning_content"] and not bound["message"]["content"]
    body |= {"max_tokens": 60, "logit_bias": {str(MARKERS["<|close|>"]): 100}}
    del body["return_token_ids"]
    choice, _ = both_chat(real, **body)
    assert choice["message"] == {"role": "assistant", "content": choice["message"]["content"]}
    assert choice["message"]["content"] in ("yes", "no") and choice["finish_reason"] == "stop"
