"""Broken and extreme messages: never INTERNAL, never UNKNOWN, and nothing is left."""

import random
import struct

import grpc
import pytest

from expertmesh.deploy.rpc.v1 import engine_pb2 as pb
from tests.support.fake_client import FakeEngineClient
from tests.support.grpc_calls import ENGINE, ask
from tests.support.grpc_server import GrpcThread
from tests.support.server_process import wait_for

BASE = [
    ask("hello", max_tokens=3, n=2, stop=["x"], logit_bias={5: 1.0}, request_id="a"),
    ask([1, 2, 3], max_tokens=2, logprobs=2, prompt_logprobs=1, seed=1, priority=3),
    ask("héllo", stream=False, model="tiny", stop_token_ids=[7], max_tokens=1),
    ask("hi", choice=pb.ChoiceConstraint(choices=["a", "b"]), max_tokens=2),
]
ALLOWED = {
    grpc.StatusCode.OK, grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.NOT_FOUND,
}  # fmt: skip


def mutated(chance: random.Random) -> bytes:
    data = bytearray(chance.choice(BASE).SerializeToString())
    for _ in range(chance.randint(1, 3)):
        at = chance.randrange(len(data) + 1)
        match chance.randrange(4):
            case 0:
                data[at : at + 1] = bytes([chance.randrange(256)])
            case 1:
                del data[at : at + chance.randint(1, 6)]
            case 2:
                data[at:at] = chance.randbytes(chance.randint(1, 6))
            case 3:
                data += data[at:]
    return bytes(data)


def extreme(chance: random.Random) -> bytes:
    """Every field from the edges of its type. Some of it is a good request."""
    numbers = {
        "double": [0.0, -0.0, 1.0, 2.0, 5e-324, -1.0, 1e308, float("nan"), float("inf")],
        "uint32": [0, 1, 2, 319, 320, 2**31, 2**32 - 1],
        "int32": [0, 1, -1, 2**31 - 1, -(2**31)],
        "int64": [0, -1, 2**63 - 1, -(2**63)],
    }
    kinds = {1: "double", 13: "uint32", 5: "int32", 3: "int64"}
    request = pb.GenerateRequest()
    request.CopyFrom(chance.choice(BASE[:3]))
    params = request.sampling_params
    fields = [f for f in params.DESCRIPTOR.fields if f.type in kinds and not f.is_repeated]
    for field in chance.sample(fields, 2):
        setattr(params, field.name, chance.choice(numbers[kinds[field.type]]))
    params.max_tokens = min(params.max_tokens, 3)
    return request.SerializeToString()


@pytest.mark.parametrize(("make", "count"), [(mutated, 300), (extreme, 200)])
def test_every_message_has_a_proper_end(
    server: GrpcThread, channel: grpc.Channel, fake: FakeEngineClient, make: object, count: int
) -> None:
    assert callable(make)
    chance = random.Random(11)
    generate = channel.unary_stream(f"/{ENGINE}/Generate")
    codes: dict[grpc.StatusCode, int] = {}
    for _ in range(count):
        data = make(chance)
        call = generate(data, timeout=20)
        try:
            messages = [pb.GenerateResponse.FromString(message) for message in call]
            assert messages[-1].HasField("complete")
        except grpc.RpcError:
            assert call.code() in ALLOWED, f"{call.code()} {call.details()}: {data!r}"
        codes[call.code()] = codes.get(call.code(), 0) + 1
    assert codes[grpc.StatusCode.OK] > count / 20
    assert codes[grpc.StatusCode.INVALID_ARGUMENT] > count / 20
    wait_for(lambda: not (fake.running or server.front.traffic.requests), 5)


def test_random_bytes_for_every_method(channel: grpc.Channel) -> None:
    chance = random.Random(3)
    for name in ("Generate", "Abort", "HealthCheck", "GetModelInfo", "GetServerInfo", "GetLoads"):
        method = channel.unary_stream(f"/{ENGINE}/{name}")
        for size in range(40):
            call = method(struct.pack(">Q", size) + chance.randbytes(size), timeout=20)
            try:
                list(call)
            except grpc.RpcError:
                assert call.code() in ALLOWED, f"{name}: {call.code()} {call.details()}"
