"""JSON schemas of the chat fields that are checked where they are rendered.

For /openapi.json only: they say no more than what actors/model/chat_messages.py accepts.
"""

from typing import Any

Schema = dict[str, Any]

_TEXT: Schema = {"type": ["string", "null"]}
_FUNCTION: Schema = {
    "type": "object",
    "required": ["name"],
    "properties": {
        "name": {"type": "string", "minLength": 1, "maxLength": 256},
        "strict": {"type": ["boolean", "null"]},
        "description": _TEXT,
        "parameters": {"type": ["object", "null"], "description": "A JSON schema."},
    },
}
_TOOL: Schema = {
    "type": "object",
    "required": ["type", "function"],
    "properties": {"type": {"const": "function"}, "function": _FUNCTION},
}
TOOLS: Schema = {"type": "array", "items": _TOOL}
TOOL_CHOICE: Schema = {
    "anyOf": [
        {"enum": ["none", "auto", "required"]},
        {
            "type": "object",
            "required": ["type", "function"],
            "properties": {
                "type": {"const": "function"},
                "function": {
                    "type": "object",
                    "required": ["name"],
                    "properties": {"name": {"type": "string", "minLength": 1}},
                },
            },
        },
    ]
}
_PARTS: Schema = {
    "type": "array",
    "minItems": 1,
    "items": {
        "type": "object",
        "required": ["type", "text"],
        "properties": {
            "type": {"enum": ["text", "input_text", "output_text"]},
            "text": {"type": "string"},
        },
    },
}
_CALL: Schema = {
    "type": "object",
    "required": ["function"],
    "properties": {
        "id": _TEXT,
        "type": {"enum": ["function", None]},
        "function": {
            "type": "object",
            "required": ["name"],
            "properties": {
                "name": {"type": "string", "minLength": 1},
                "arguments": {"type": ["string", "object", "null"]},
            },
        },
    },
}
MESSAGES: Schema = {
    "type": "array",
    "minItems": 1,
    "items": {
        "type": "object",
        "required": ["role"],
        "properties": {
            "role": {"enum": ["system", "developer", "user", "assistant", "tool"]},
            "content": {"anyOf": [{"type": ["string", "null"]}, _PARTS]},
            "name": _TEXT,
            "tool_call_id": _TEXT,
            "tool_calls": {"anyOf": [{"type": "array", "items": _CALL}, {"type": "null"}]},
            "tools": {"anyOf": [TOOLS, {"type": "null"}]},
            "reasoning_content": {"description": "Of an assistant's turn: text."},
            "reasoning": {"description": "Another name of reasoning_content."},
        },
    },
}
