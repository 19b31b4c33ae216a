"""The Kimi-K2 style template of the 48B family: `<|im_user|>user<|im_middle|>text<|im_end|>`.

Plain conversations only. Tools and reasoning belong to K3's format; tools are refused here, not
dropped. The template has no words for a response format; a grammar alone sees to it. No default
system message is added.
"""

from expertmesh.actors.model.chat_messages import ChatError, Message
from expertmesh.actors.model.tokenizer import Tokenizer

_STARTS = {"user": "<|im_user|>", "assistant": "<|im_assistant|>", "system": "<|im_system|>"}
_MIDDLE, END = "<|im_middle|>", "<|im_end|>"


def has_markers(tokenizer: Tokenizer) -> bool:
    """Whether the tokenizer names the template's five ids."""
    names = (*_STARTS.values(), _MIDDLE, END)
    return all(tokenizer.special_id(name) is not None for name in names)


def render(messages: list[Message], tokenizer: Tokenizer, add_generation_prompt: bool) -> list[int]:
    """Prompt ids; each piece of text is encoded alone and literally.

    Raises:
        ChatError: a message that this template cannot express.
    """
    ids: list[int] = []

    def marker(name: str) -> None:
        token_id = tokenizer.special_id(name)
        assert token_id is not None, "the caller checks has_markers first"
        ids.append(token_id)

    for message in messages:
        if message.role == "tool" or message.tools or message.calls:
            raise ChatError(message.path, "this checkpoint's chat format has no tools")
        marker(_STARTS[message.role])
        ids += tokenizer.encode(message.name or message.role)
        marker(_MIDDLE)
        ids += tokenizer.encode(message.text or "")
        marker(END)
    if add_generation_prompt:
        marker(_STARTS["assistant"])
        ids += tokenizer.encode("assistant")
        marker(_MIDDLE)
    return ids
