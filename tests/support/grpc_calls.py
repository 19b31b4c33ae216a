"""Short words for Generate calls in tests."""

from collections.abc import Iterable
from typing import Any

import grpc
from google.rpc import error_details_pb2
from grpc_status import rpc_status

from expertmesh.deploy.rpc.v1 import engine_pb2 as pb

ENGINE = "expertmesh.v1.Engine"


def ask(prompt: str | list[int] = "hello", **fields: Any) -> pb.GenerateRequest:
    """fields of SamplingParams, or of the request. Greedy unless asked otherwise."""
    top = {name: fields.pop(name) for name in list(fields) if name in _TOP}
    request = pb.GenerateRequest(
        sampling_params=pb.SamplingParams(**({"temperature": 0} | fields)), **top
    )
    if isinstance(prompt, str):
        request.text = prompt
    else:
        request.tokenized.SetInParent()  # also without any id
        request.tokenized.input_ids.extend(prompt)
    return request


_TOP = frozenset(pb.GenerateRequest.DESCRIPTOR.fields_by_name) - {"sampling_params"}


class Answer:
    """The messages of one call, by choice. Each choice must end exactly once."""

    def __init__(self, messages: Iterable[pb.GenerateResponse]) -> None:
        self.chunks: dict[int, list[pb.GenerateStreamChunk]] = {}
        self.ends: dict[int, pb.GenerateComplete] = {}
        self.ids: set[str] = set()
        for message in messages:
            self.ids.add(message.request_id)
            part = message.chunk if message.WhichOneof("response") == "chunk" else message.complete
            assert part.index not in self.ends, "a message after the end"
            if isinstance(part, pb.GenerateStreamChunk):
                self.chunks.setdefault(part.index, []).append(part)
            else:
                self.ends[part.index] = part

    def text(self, index: int = 0) -> str:
        """Of the chunks where there are any; then it must be the end's too."""
        end = self.ends[index]
        if index in self.chunks:
            assert "".join(chunk.text for chunk in self.chunks[index]) == end.text
            assert [i for chunk in self.chunks[index] for i in chunk.token_ids] == end.output_ids
            assert self.chunks[index][-1].completion_tokens == end.completion_tokens
        assert len(end.output_ids) == end.completion_tokens
        return end.text


def refused(call: Any) -> tuple[grpc.StatusCode, str, dict[str, Any]]:
    """(code, message, details by type name) of a call that must fail before any message."""
    try:
        messages = list(call) if hasattr(call, "__next__") else [call]
    except grpc.RpcError as error:
        return error.code(), error.details(), details_of(error)
    raise AssertionError(f"not refused: {messages}")


def details_of(error: Any) -> dict[str, Any]:
    status = rpc_status.from_call(error)
    found: dict[str, Any] = {}
    for packed in [] if status is None else status.details:
        kind = packed.TypeName().rpartition(".")[2]
        found[kind] = getattr(error_details_pb2, kind).FromString(packed.value)
    return found
