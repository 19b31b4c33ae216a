"""TLS of the HTTP port: served, waited for at the start, refused when its files can not work."""

import asyncio
import ssl
from pathlib import Path

import httpx
import pytest

from expertmesh.deploy import preflight
from expertmesh.deploy.edge_server import EdgeServer
from expertmesh.deploy.edge_settings import AuthSettings, EdgeSettings, GrpcSettings, TlsSettings
from expertmesh.deploy.exit_codes import ExitCode, Refused
from expertmesh.deploy.front import Front
from expertmesh.deploy.listener import bind
from expertmesh.deploy.openai.app import build_app
from expertmesh.deploy.openai.served import ServedModel
from expertmesh.deploy.serve_console import url_of
from expertmesh.deploy.serve_mesh import _wait_ready
from expertmesh.deploy.serve_options import ServeOptions, with_flags
from tests.deploy.grpc.test_access import Authority
from tests.deploy.test_preflight import options
from tests.support.fake_client import FakeEngineClient
from tests.support.http_server import free_port


@pytest.fixture
def ours(tmp_path: Path) -> Authority:
    return Authority(tmp_path, "ours")


def settings(ours: Authority, clients: bool = False) -> EdgeSettings:
    cert, key = ours.issue("server")
    tls = TlsSettings(cert_file=cert, key_file=key, client_ca_file=ours.ca if clients else None)
    return EdgeSettings.model_validate({"http": {"tls": tls.model_dump()}})


async def served_over(edge: EdgeSettings, served: ServedModel, wanted: ServeOptions) -> None:
    """Starts, waits as `expertmesh serve` does, and stops."""
    front = Front(FakeEngineClient(), served, edge)
    listener = bind("127.0.0.1", wanted.port)
    server = EdgeServer(front, build_app(front), "127.0.0.1", 5)
    await server.start(listener)
    try:
        await asyncio.to_thread(_wait_ready, wanted, 10.0)
    finally:
        server.stop()
        await asyncio.wait_for(server.wait(), 20)


@pytest.mark.parametrize("clients", [False, True])
def test_a_start_waits_for_the_port_that_clients_use(
    served: ServedModel, ours: Authority, clients: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    monkeypatch.setenv("https_proxy", "http://127.0.0.1:9")
    edge = settings(ours, clients)
    wanted = options(Path("m"), port=free_port(), edge=edge)
    assert url_of(wanted).startswith("https://")
    preflight.check_tls("http", edge.http.tls)
    asyncio.run(served_over(edge, served, wanted))


def test_clients_check_the_certificate(served: ServedModel, ours: Authority) -> None:
    async def main() -> None:
        front = Front(FakeEngineClient(), served, settings(ours))
        listener = bind("127.0.0.1", 0)
        server = EdgeServer(front, build_app(front), "127.0.0.1", 5)
        await server.start(listener)
        url = f"https://127.0.0.1:{listener.getsockname()[1]}/health"
        trusting = ssl.create_default_context(cafile=ours.ca)
        async with httpx.AsyncClient(verify=trusting) as client:
            assert (await client.get(url)).status_code == 200
        async with httpx.AsyncClient() as client:
            with pytest.raises(httpx.ConnectError):
                await client.get(url)
        server.stop()
        await asyncio.wait_for(server.wait(), 20)

    asyncio.run(main())


def test_files_that_can_not_work_are_told_before_anything_starts(ours: Authority) -> None:
    cert, _ = ours.issue("server")
    _, other = ours.issue("other")
    for key in (other, ours.folder / "none.key"):
        with pytest.raises(Refused, match=r"http\.tls: .*server\.pem") as refused:
            preflight.check_tls("http", TlsSettings(cert_file=cert, key_file=key))
        assert refused.value.code is ExitCode.USAGE


def test_a_server_that_does_not_start_says_so(served: ServedModel, ours: Authority) -> None:
    async def main() -> None:
        cert, key = ours.issue("server")
        tls = {"cert_file": cert, "key_file": key}
        edge = EdgeSettings.model_validate({"http": {"tls": tls}, "grpc": {"port": free_port()}})
        key.unlink()
        front = Front(FakeEngineClient(), served, edge)
        server = EdgeServer(front, build_app(front), "127.0.0.1", 5)
        with bind("127.0.0.1", 0) as listener, pytest.raises(OSError):
            await server.start(listener)
        assert edge.grpc.port is not None
        bind("127.0.0.1", edge.grpc.port).close()  # the other door has closed as well

    asyncio.run(main())


def test_paths_mean_the_same_in_every_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    names = {"cert_file": "c.pem", "key_file": "k.pem", "client_ca_file": "ca.pem"}
    tls = TlsSettings.model_validate(names)
    edge = EdgeSettings.model_validate({"http": {"tls": tls, "drain_file": "drain"}})
    edge = edge.model_copy(update={"grpc": GrpcSettings(tls=tls), "auth": AuthSettings()})
    keys = tmp_path / "keys.yaml"
    keys.write_text('{"name": "a", "hash": "sha256:' + "0" * 64 + '"}\n')
    made = with_flags(edge, 50051, Path("keys.yaml"))
    assert made.auth.keys_file == keys and made.http.drain_file == tmp_path / "drain"
    there = TlsSettings.model_validate({field: tmp_path / name for field, name in names.items()})
    assert made.http.tls == made.grpc.tls == there
