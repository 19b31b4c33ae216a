"""Who gets in: API keys in the metadata, and certificates."""

import asyncio
import datetime
import ipaddress
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import (
    ProtoReflectionDescriptorDatabase,
)

from expertmesh.deploy.auth.keys import hash_key, new_key
from expertmesh.deploy.edge_settings import AuthSettings, EdgeSettings, TlsSettings
from expertmesh.deploy.openai import constraints
from expertmesh.deploy.openai.served import ServedModel
from expertmesh.deploy.rpc.tls import TlsError, credentials
from expertmesh.deploy.rpc.v1 import engine_pb2 as pb
from expertmesh.deploy.rpc.v1.engine_pb2_grpc import EngineStub
from tests.deploy.grpc.test_discovery import SERVING, check
from tests.support.fake_client import FakeEngineClient
from tests.support.grpc_calls import ENGINE, Answer, ask, refused
from tests.support.grpc_server import GrpcThread, grpc_server
from tests.support.raw_grpc import RawChannel, framed

KEYS = {name: new_key() for name in ("alice", "bob")}


def bearer(key: str) -> list[tuple[str, str]]:
    return [("authorization", f"Bearer {key}")]


class TestKeys:
    @pytest.fixture
    def guarded(
        self, served: ServedModel, tmp_path: Path
    ) -> Iterator[tuple[FakeEngineClient, GrpcThread]]:
        file = tmp_path / "keys.yaml"
        limits = {"alice": "", "bob": ", requests_in_flight: 1"}
        lines = [
            f"- {{name: {name}, hash: '{hash_key(key)}'{limits[name]}}}"
            for name, key in KEYS.items()
        ]
        file.write_text("\n".join(lines))
        fake = FakeEngineClient(seconds=0.01)
        edge = EdgeSettings(auth=AuthSettings(keys_file=file))
        with grpc_server(fake, served, edge=edge) as server:
            yield fake, server

    @pytest.fixture
    def channel(self, guarded: tuple[FakeEngineClient, GrpcThread]) -> Iterator[grpc.Channel]:
        with grpc.insecure_channel(guarded[1].address) as channel:
            yield channel

    def test_without_a_key_nothing_answers_but_health(self, channel: grpc.Channel) -> None:
        for name in ("Generate", "Abort", "HealthCheck", "GetModelInfo", "GetLoads", "Nothing"):
            code, message, details = refused(channel.unary_stream(f"/{ENGINE}/{name}")(b""))
            assert code is grpc.StatusCode.UNAUTHENTICATED and "Bearer" in message
            assert details["ErrorInfo"].reason == "INVALID_API_KEY"
        with pytest.raises(grpc.RpcError) as failed:
            ProtoReflectionDescriptorDatabase(channel).get_services()
        assert failed.value.code() is grpc.StatusCode.UNAUTHENTICATED
        assert check(channel, ENGINE) == check(channel, "") == SERVING

    def test_with_a_key(self, channel: grpc.Channel) -> None:
        engine = EngineStub(channel)
        assert Answer(engine.Generate(ask(), metadata=bearer(KEYS["alice"]))).ends
        for wrong in (
            bearer("em-wrong"), bearer(KEYS["alice"] + "x"), bearer(KEYS["alice"]) * 2,
            [("authorization", KEYS["alice"])], [("authorization", "")],
        ):  # fmt: skip
            code, message, _ = refused(engine.Generate(ask(), metadata=wrong))
            assert code is grpc.StatusCode.UNAUTHENTICATED
            assert KEYS["alice"] not in message

    def test_a_key_that_is_no_text(self, guarded: tuple[FakeEngineClient, GrpcThread]) -> None:
        with RawChannel(guarded[1].address) as raw:
            body = framed(ask().SerializeToString())
            code, _ = raw.call(f"/{ENGINE}/Generate", body, [(b"authorization", b"Bearer \xff")])
        assert code == grpc.StatusCode.UNAUTHENTICATED.value[0]

    def test_calls_of_another_key_can_not_be_ended(self, channel: grpc.Channel) -> None:
        engine, request = EngineStub(channel), pb.AbortRequest(request_id="same")
        call = engine.Generate(
            ask(request_id="same", max_tokens=900), metadata=bearer(KEYS["alice"]), timeout=30
        )
        next(call)
        assert engine.Abort(request, metadata=bearer(KEYS["bob"])).aborted == 0
        assert engine.Abort(request, metadata=bearer(KEYS["alice"])).aborted == 1
        assert list(call)[-1].complete.finish_reason == "abort"

    def test_a_key_s_limit(self, channel: grpc.Channel) -> None:
        engine, bob = EngineStub(channel), bearer(KEYS["bob"])
        running = engine.Generate(ask(max_tokens=900), metadata=bob, timeout=30)
        next(running)
        code, message, details = refused(engine.Generate(ask(), metadata=bob))
        assert code is grpc.StatusCode.RESOURCE_EXHAUSTED and "bob" in message
        assert "RetryInfo" in details
        assert Answer(engine.Generate(ask(), metadata=bearer(KEYS["alice"]))).ends
        running.cancel()

    def test_a_call_counts_while_its_grammar_compiles(
        self, channel: grpc.Channel, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        begun = threading.Event()

        async def never(*arguments: Any) -> None:
            begun.set()
            await asyncio.Event().wait()

        monkeypatch.setattr(constraints, "admit", never)
        engine, bob = EngineStub(channel), bearer(KEYS["bob"])
        compiling = engine.Generate(ask(), metadata=bob, timeout=30)
        assert begun.wait(10)
        code, message, _ = refused(engine.Generate(ask(), metadata=bob, timeout=5))
        assert code is grpc.StatusCode.RESOURCE_EXHAUSTED and "bob" in message
        compiling.cancel()


class Authority:
    """Makes PEM files in a folder."""

    def __init__(self, folder: Path, name: str) -> None:
        self.folder, self._key = folder, ec.generate_private_key(ec.SECP256R1())
        self._name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        self.ca = folder / f"{name}-ca.pem"
        certificate = self._signed(self._name, self._key, ca=True)
        self.ca.write_bytes(certificate.public_bytes(serialization.Encoding.PEM))

    def _signed(self, subject: x509.Name, key: Any, ca: bool = False) -> x509.Certificate:
        now = datetime.datetime.now(datetime.UTC)
        names: list[x509.GeneralName] = [
            x509.DNSName("localhost"), x509.IPAddress(ipaddress.ip_address("127.0.0.1")),
        ]  # fmt: skip
        return (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(self._name)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - datetime.timedelta(days=1))
            .not_valid_after(now + datetime.timedelta(days=1))
            .add_extension(x509.BasicConstraints(ca=ca, path_length=None), critical=True)
            .add_extension(x509.SubjectAlternativeName(names), critical=False)
            .sign(self._key, hashes.SHA256())
        )

    def issue(self, name: str) -> tuple[Path, Path]:
        """(certificate, key)"""
        key = ec.generate_private_key(ec.SECP256R1())
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        files = self.folder / f"{name}.pem", self.folder / f"{name}.key"
        signed = self._signed(subject, key)
        files[0].write_bytes(signed.public_bytes(serialization.Encoding.PEM))
        files[1].write_bytes(
            key.private_bytes(
                serialization.Encoding.PEM,
                serialization.PrivateFormat.PKCS8,
                serialization.NoEncryption(),
            )
        )
        return files


def health_over(server: GrpcThread, ca: Path, client: tuple[Path, Path] | None = None) -> bool:
    """Whether a client that trusts `ca`, with a certificate of its own or without, gets in."""
    chain, key = (None, None) if client is None else [path.read_bytes() for path in client]
    secure = grpc.ssl_channel_credentials(ca.read_bytes(), key, chain)
    with grpc.secure_channel(server.address, secure) as channel:
        try:
            return EngineStub(channel).HealthCheck(pb.HealthCheckRequest(), timeout=5).healthy
        except grpc.RpcError as error:
            assert error.code() is grpc.StatusCode.UNAVAILABLE
            return False


class TestTls:
    @pytest.fixture
    def ours(self, tmp_path: Path) -> Authority:
        return Authority(tmp_path, "ours")

    def test_serves_who_trusts_it_and_nobody_in_the_clear(
        self, served: ServedModel, ours: Authority
    ) -> None:
        cert, key = ours.issue("server")
        other = Authority(ours.folder, "other")
        tls = TlsSettings(cert_file=cert, key_file=key)
        with grpc_server(FakeEngineClient(), served, tls=tls) as server:
            assert health_over(server, ours.ca)
            assert not health_over(server, other.ca)
            with grpc.insecure_channel(server.address) as channel:
                code, _, _ = refused(EngineStub(channel).Generate(ask(), timeout=5))
                assert code is grpc.StatusCode.UNAVAILABLE

    def test_with_an_authority_of_its_own_clients_need_a_certificate(
        self, served: ServedModel, ours: Authority
    ) -> None:
        cert, key = ours.issue("server")
        clients, others = Authority(ours.folder, "clients"), Authority(ours.folder, "others")
        tls = TlsSettings(cert_file=cert, key_file=key, client_ca_file=clients.ca)
        with grpc_server(FakeEngineClient(), served, tls=tls) as server:
            assert health_over(server, ours.ca, clients.issue("client"))
            assert not health_over(server, ours.ca)
            assert not health_over(server, ours.ca, others.issue("stranger"))

    def test_a_renewed_certificate_is_used(self, served: ServedModel, ours: Authority) -> None:
        cert, key = ours.issue("server")
        tls = TlsSettings(cert_file=cert, key_file=key)
        with grpc_server(FakeEngineClient(), served, tls=tls) as server:
            assert health_over(server, ours.ca)
            other = Authority(ours.folder, "other")
            other.issue("server")
            assert health_over(server, other.ca) and not health_over(server, ours.ca)
            cert.write_bytes(b"half a fi")  # being written, or gone wrong
            assert health_over(server, other.ca)

    @pytest.mark.parametrize(
        "harm",
        [
            lambda cert, key: cert.unlink(),
            lambda cert, key: key.write_bytes(b"no key"),
            lambda cert, key: cert.write_bytes(b""),
            lambda cert, key: Authority(cert.parent, "other").issue("server")[0].replace(key),
        ],
    )
    def test_files_that_can_not_work_are_named(
        self, served: ServedModel, ours: Authority, harm: Callable[[Path, Path], None]
    ) -> None:
        cert, key = ours.issue("server")
        harm(cert, key)
        settings = TlsSettings(cert_file=cert, key_file=key)
        with pytest.raises(TlsError, match=str(cert)):
            credentials(settings)
        with (
            pytest.raises(OSError, match=str(cert)),
            grpc_server(FakeEngineClient(), served, tls=settings),
        ):
            pass
