"""Requests and helpers shared by the tests of the chat format."""

from pathlib import Path
from typing import Any

import pytest

from expertmesh.actors.model.chat import ChatError, render_chat
from expertmesh.actors.model.tokenizer import Tokenizer
from tests.support.tokenizers import Format, Vocabulary, write_tokenizer

VOCAB = 320
Json = dict[str, Any]

USER: Json = {"role": "user", "content": "hi"}
WEATHER: Json = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Weather of a city",
        "parameters": {"type": "object", "properties": {"城市": {"type": "string"}, "🌡": {}}},
    },
}


def load_tokenizer(folder: Path, chat: Format = "kimi_k3") -> Tokenizer:
    """A tiny tokenizer of VOCAB ids, written into folder and loaded."""
    found = Tokenizer.load(write_tokenizer(folder, VOCAB, chat), Vocabulary(VOCAB))
    assert found is not None
    return found


def ids(tokenizer: Tokenizer, messages: Any, **options: Any) -> list[int]:
    """Prompt ids with thinking off, unless said otherwise."""
    values: Json = {"tools": None, "thinking": None, "tool_choice": None} | options
    return render_chat(messages, tokenizer=tokenizer, **values)


def refusal(tokenizer: Tokenizer, messages: Any, **options: Any) -> ChatError:
    """The error of a request that must be refused, itself checked for form and size."""
    with pytest.raises(ChatError) as caught:
        ids(tokenizer, messages, **options)
    assert str(caught.value).startswith(caught.value.param)
    assert len(str(caught.value)) < 500
    return caught.value


def call(name: str, arguments: Any, call_id: str | None = None) -> Json:
    """One tool call of an assistant message."""
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}
