"""What both generation endpoints share: ids, usage, timing, and the SSE frame around a chunk."""

import time
import uuid
from abc import ABC, abstractmethod
from base64 import b64encode
from io import BytesIO
from typing import Any

import numpy as np
import orjson

from expertmesh.actors.attention.messages import GenerateRequest, KvReport, TokenOutput
from expertmesh.actors.constraint.spec import Constraint
from expertmesh.deploy.auth.keys import ApiKey
from expertmesh.deploy.openai.protocol import SamplingRequest
from expertmesh.deploy.openai.served import ServedModel
from expertmesh.deploy.openai.tenant import tenant_of

DONE = b"data: [DONE]\n\n"
KEEP_ALIVE = b": keep-alive\n\n"


def event(data: Any) -> bytes:
    """One server-sent event."""
    return b"data: " + orjson.dumps(data) + b"\n\n"


class Generation(ABC):
    """One HTTP request on its way: engine requests out, pieces of answer in.

    `feed` is called with each engine output of a choice and returns (bytes of the stream, whether
    the choice is complete). A plain (non-stream) answer feeds the same way, drops the bytes and
    asks for `body` at the end, so the two can not differ.
    """

    def __init__(
        self,
        request: SamplingRequest,
        served: ServedModel,
        key: ApiKey | None,
        prefix: str,
        kind: str,
    ) -> None:
        """key: whose request it is, where keys are needed; its cached state is nobody else's."""
        self.served = served
        self.tenant = tenant_of(key, request.cache_salt)
        self.stream = request.stream
        self.include_usage = request.include_usage
        self._running_usage = request.continuous_usage
        self.internal_id = uuid.uuid4().hex
        self.id = f"{prefix}-{request.request_id or self.internal_id}"
        self.created = int(time.time())
        self.model = request.model
        self.kind = kind
        self.n = request.n
        self.arrived = time.perf_counter()
        self.first_token_at: float | None = None
        self.prompt_tokens: dict[int, int] = {}
        self._cached: dict[int, int] = {}
        self._kv: dict[int, KvReport] = {}
        self.completion_tokens = 0
        self._want_routed = request.return_routed_experts
        self._routed: dict[int, list[bytes]] = {}
        head = {"id": self.id, "object": self._chunk_kind(), "created": self.created}
        # Everything of a chunk up to its choice, built once: a token must not cost a JSON tree.
        self.head = b"data: " + orjson.dumps(head | {"model": self.model})[:-1]
        self._opens: list[bytes] = []
        self.requests: list[GenerateRequest] = []
        # What constraints.admit has to see before the requests go to an engine.
        self.grammars: list[Constraint] = []
        self.finish_reasons: list[str] = []

    def add(self, request: GenerateRequest) -> None:
        """One more choice. All are added before any output is fed."""
        index = len(self.requests)
        self.requests.append(request)
        self._opens.append(b',"choices":[{"index":%d,' % index)
        # Per prompt, not per choice: n choices of a prompt pay for it once.
        self.prompt_tokens[index // self.n] = len(request.prompt_ids)

    def open_choice(self, index: int) -> bytes:
        """A chunk's bytes up to the fields of its choice. Usage, when every chunk is to have it,
        counts all choices up to now."""
        if self._running_usage:
            usage = b',"usage":' + orjson.dumps(self.usage())
            return self.head + usage + self._opens[index]
        return self.head + self._opens[index]

    @property
    def complete(self) -> bool:
        """Whether every choice has ended."""
        return len(self.finish_reasons) == len(self.requests)

    def choice_finished(self, reason: str | None) -> None:
        """`reason`: as the API names it."""
        self.finish_reasons.append(reason or "stop")

    def _chunk_kind(self) -> str:
        return self.kind

    @abstractmethod
    def opening(self) -> bytes:
        """What a stream sends before any token."""

    @abstractmethod
    def feed(self, index: int, output: TokenOutput) -> tuple[bytes, bool]:
        """Account for one output of choice `index`."""

    @abstractmethod
    def choice(self, index: int) -> dict[str, Any]:
        """Choice `index` of the plain answer."""

    def account(self, index: int, output: TokenOutput, tokens: int) -> None:
        """Usage, and what is reported at the end. tokens: how many of the output's ids count (a
        stop string cuts)."""
        if tokens and self.first_token_at is None:
            self.first_token_at = time.perf_counter()
        self.completion_tokens += tokens
        self._cached[index] = max(self._cached.get(index, 0), output.cached_tokens)
        if output.kv is not None:
            self._kv[index] = output.kv
        if self._want_routed and output.routed_experts:
            self._routed.setdefault(index, []).append(output.routed_experts)

    def kv_report(self, index: int) -> KvReport | None:
        """How choice `index` read old tokens, None where that was exact."""
        return self._kv.get(index)

    def ending(self, index: int) -> dict[str, Any]:
        """What only a finished choice has, where there is something to tell."""
        out: dict[str, Any] = {}
        if (routed := self.routed_experts(index)) is not None:
            out["routed_experts"] = routed
        if (report := self.kv_report(index)) is not None:
            out["kv"] = {name: getattr(report, name) for name in report.__struct_fields__}
        return out

    def routed_experts(self, index: int) -> str | None:
        """base64 of a .npy file, int16 [tokens, MoE layers, top_k], or None when not asked for.

        Row t is position t of prompt and answer; the last generated token was never computed.
        """
        if not self._want_routed:
            return None
        flat = np.frombuffer(b"".join(self._routed.get(index, [])), dtype="<i2")
        file = BytesIO()
        np.save(file, flat.reshape(-1, self.served.moe_layers, self.served.top_k))
        return b64encode(file.getvalue()).decode()

    def _cached_tokens(self) -> int:
        """Of all prompts. One that a choice has computed counts as computed, although the prompt's
        other choices found it in the cache then."""
        least: dict[int, int] = {}
        for index, cached in self._cached.items():
            prompt = index // self.n
            least[prompt] = min(cached, least.get(prompt, cached))
        return sum(least.values())

    def usage(self) -> dict[str, Any]:
        prompt = sum(self.prompt_tokens.values())
        return {
            "prompt_tokens": prompt,
            "completion_tokens": self.completion_tokens,
            "total_tokens": prompt + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self._cached_tokens()},
        }

    def closing(self) -> bytes:
        """The end of a stream that went well."""
        if not self.include_usage:
            return DONE
        return self.head + b',"choices":[],"usage":' + orjson.dumps(self.usage()) + b"}\n\n" + DONE

    def body(self) -> bytes:
        """The plain answer."""
        return orjson.dumps(
            {
                "id": self.id,
                "object": self.kind,
                "created": self.created,
                "model": self.model,
                "choices": [self.choice(index) for index in range(len(self.requests))],
                "usage": self.usage(),
            }
        )
