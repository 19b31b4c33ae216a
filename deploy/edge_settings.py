"""Settings of the front door: what clients may do and how they get in.

They come from the sections http, grpc, auth and queue of `expertmesh serve --config FILE`, or from
`edge` in the arguments of a Serve application. Unknown keys are refused.
"""

import re
import ssl
from pathlib import Path
from typing import Annotated, Any, Self

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from expertmesh.deploy.auth.keys import HASH_PATTERN
from expertmesh.deploy.openai.served import Limits

_LIMITS = Limits()


class _Section(BaseModel):
    # No error repeats what it refuses: it may be a secret in the wrong place.
    model_config = ConfigDict(frozen=True, extra="forbid", hide_input_in_errors=True)

    def absolute(self) -> Self:
        """With paths that mean the same in every folder: the front door may run in another one."""
        fresh: dict[str, Any] = {}
        for name in type(self).model_fields:
            value = getattr(self, name)
            if isinstance(value, Path | _Section):
                fresh[name] = value.absolute()
        return self.model_copy(update=fresh)


class TlsSettings(_Section):
    """PEM files. With client_ca_file, clients must show a certificate that it signed."""

    cert_file: Path
    key_file: Path
    client_ca_file: Path | None = None

    @property
    def files(self) -> tuple[Path, ...]:
        """Certificate, key and, if there is one, the clients' authority."""
        ca_file = self.client_ca_file
        return (self.cert_file, self.key_file) + (() if ca_file is None else (ca_file,))

    def check(self) -> None:
        """Raises OSError or ValueError when no server can use the files, or key and certificate do
        not belong together. A key that needs a password is refused: nobody is there to ask."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(self.cert_file, self.key_file, password="")
        if self.client_ca_file is not None:
            context.load_verify_locations(self.client_ca_file)


def _origin(value: str) -> str:
    """As browsers send it, to be compared: no path, and no port that goes without saying."""
    usual = value.endswith((":80", ":443")[value.startswith("https:")])
    if value != "*" and (usual or not re.fullmatch(r"https?://[a-z0-9.\-\[\]:]+", value)):
        raise ValueError('must be "*" or an origin such as "https://chat.example"')
    return value


class HttpSettings(_Section):
    """The OpenAI API's port."""

    cors_origins: tuple[Annotated[str, AfterValidator(_origin)], ...] = Field(
        (),
        description='Origins that browsers may call from, e.g. "https://chat.example"; "*": all.',
    )
    body_bytes: int = Field(_LIMITS.body_bytes, gt=0)
    request_seconds: float = Field(_LIMITS.request_seconds, gt=0)
    chunks_per_second: float | None = Field(
        None, gt=0, description="Stream chunks of one front door. Unset: what its way out bears."
    )
    keep_alive_seconds: float = Field(
        _LIMITS.keep_alive_seconds, gt=0, description="A silent stream gets a comment this often."
    )
    upload_seconds: float = Field(
        _LIMITS.upload_seconds, gt=0, description="A request's body must have arrived by then."
    )
    # Above the idle time of common client pools and proxies (60 to 75 s): whoever closes first
    # must be the client, or its next request meets a closing socket.
    idle_seconds: int = Field(
        90, gt=0, description="A connection without a request is kept this long."
    )
    drain_file: Path | None = Field(
        None,
        description="While this file exists, /ready is red and each answer closes its connection, "
        "but nothing is refused: how a load balancer's target leaves.",
    )
    tls: TlsSettings | None = None


class GrpcSettings(_Section):
    """The engine protocol's own port. Off unless it has one."""

    port: int | None = Field(None, ge=1, le=65535)
    host: str | None = Field(None, description="Address to listen on. Unset: HTTP's.")
    message_bytes: int = Field(64 << 20, gt=0, description="Largest message, either way.")
    reflection: bool = True
    min_ping_interval_s: float = Field(
        10.0, gt=0, description="Clients may ping this often, also while nothing is sent."
    )
    keepalive_s: float = Field(
        30.0, gt=0, description="A silent client is pinged this often; one that is gone is dropped."
    )
    max_streams: int = Field(
        1024, ge=1, description="Calls at once of one connection; its client holds more back."
    )
    tls: TlsSettings | None = None


class AuthSettings(_Section):
    """Who may use the API. With neither a file nor hashes, everybody who can reach the port."""

    keys_file: Path | None = Field(
        None, description="API keys as hashes, with their limits; read again when it changes."
    )
    key_hashes: tuple[Annotated[str, Field(pattern=HASH_PATTERN)], ...] = Field(
        (), description="Hashes of further keys; EXPERTMESH_API_KEYS becomes these.", repr=False
    )

    def with_hashes(self, hashes: tuple[str, ...]) -> "AuthSettings":
        """With further keys, each once."""
        known = tuple(dict.fromkeys((*self.key_hashes, *hashes)))
        return self.model_copy(update={"key_hashes": known})


class QueueSettings(_Section):
    """Requests beyond what the engines run at once wait here, fairly, or are told 429."""

    running: int | None = Field(
        None,
        ge=1,
        description="Choices (prompts x n) given to the engines at once by one front door. Unset: "
        "two for each state slot that the engines have together, which follows scaling.",
    )
    # Less than Limits.requests, which refuses whoever comes: here the longest queue gives way.
    waiting: int = Field(1024, ge=0, description="Requests that may wait for a turn.")
    wait_seconds: float = Field(600.0, gt=0, description="How long one may wait.")


class EdgeSettings(_Section):
    """All of the front door."""

    http: HttpSettings = Field(default_factory=HttpSettings)
    grpc: GrpcSettings = Field(default_factory=GrpcSettings)
    auth: AuthSettings = Field(default_factory=AuthSettings)
    queue: QueueSettings = Field(default_factory=QueueSettings)

    def limits(self, chunks_per_second: float = _LIMITS.chunks_per_second) -> Limits:
        """What one client may ask for. chunks_per_second: unless the settings say."""
        http = self.http
        return Limits(
            body_bytes=http.body_bytes,
            request_seconds=http.request_seconds,
            chunks_per_second=http.chunks_per_second or chunks_per_second,
            keep_alive_seconds=http.keep_alive_seconds,
            upload_seconds=http.upload_seconds,
        )


SECTIONS = tuple(EdgeSettings.model_fields)
