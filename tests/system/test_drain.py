"""SIGTERM to a real server: what runs ends well, what is new goes elsewhere, probes are right."""

import signal
import socket
from pathlib import Path

import httpx
import orjson
import pytest

from tests.support.checkpoints import write_checkpoint
from tests.support.door import envelope, parse_events
from tests.support.server_process import wait_for
from tests.support.watched_server import watched_server

TOKENS, CHOICES = 500, 2


def start_stream(url: str) -> socket.socket:
    """A stream that cannot end before somebody reads: its answer is larger than all buffers."""
    body = orjson.dumps(
        {
            "model": "tiny",
            "prompt": "x",
            "max_tokens": TOKENS,
            "n": CHOICES,
            "logprobs": 20,
            "ignore_eos": True,
            "stream": True,
        }
    )
    host, port = url.removeprefix("http://").split(":")
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    connection.settimeout(120)
    connection.connect((host, int(port)))
    head = (
        "POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
        f"content-length: {len(body)}\r\n\r\n"
    )
    connection.sendall(head.encode() + body)
    return connection


@pytest.mark.timeout(300)
def test_a_drain_refuses_the_new_and_ends_the_old(tmp_path: Path) -> None:
    model = write_checkpoint(tmp_path / "tiny", tokenizer=True, num_hidden_layers=2)
    new = {"model": "tiny", "prompt": "x", "max_tokens": 1}
    with (
        watched_server(model, "--grace-seconds", "100") as server,
        httpx.Client(base_url=server.url, timeout=30) as pooled,
        start_stream(server.url) as stream,
    ):
        wait_for(lambda: bool(pooled.get("/load").json()["streams"]), 30)
        server.process.signal(signal.SIGTERM)
        wait_for(lambda: httpx.get(f"{server.url}/ready").status_code == 503, 30)
        # Over the connection from before, and over new ones.
        for client in (pooled, httpx):
            refused = client.post(f"{server.url}/v1/completions", json=new)
            assert "stopping" in envelope(refused, 503)["message"]
            assert refused.headers["connection"] == "close"
            assert int(refused.headers["retry-after"]) >= 1
        assert httpx.get(f"{server.url}/health").status_code == 200
        assert server.process.process.poll() is None

        file = stream.makefile("rb")
        while file.readline().strip():
            pass
        pieces = []
        while size := int(file.readline(), 16):
            pieces.append(file.read(size))
            file.readline()
        events = parse_events(b"".join(pieces).decode())
        reasons = [choice["finish_reason"] for event in events for choice in event["choices"]]
        assert [reason for reason in reasons if reason] == ["length"] * CHOICES
        file.close()
        stream.close()
        assert server.process.wait(60) == 0, server.process.output
        assert server.process.descendants() == {}
        with pytest.raises(httpx.ConnectError):
            httpx.get(f"{server.url}/health")
