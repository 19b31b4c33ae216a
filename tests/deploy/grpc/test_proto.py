"""The .proto: what its compiler made of it is committed, and it follows the conventions."""

import re
import tomllib
from pathlib import Path

import pytest
from google.protobuf import descriptor_pb2
from grpc_tools import protoc

from expertmesh.deploy.rpc import codegen
from expertmesh.deploy.rpc.v1 import engine_pb2 as pb

ROOT = Path(__file__).resolve().parents[3]


def test_the_generated_code_is_current() -> None:
    assert codegen.stale() == [], "run: python -m expertmesh.deploy.rpc.codegen --write"


def test_the_wheel_has_proto_and_stubs() -> None:
    data = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    assert "*.proto" in data["package-data"]["*"]  # *.pyi is setuptools' own default


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> descriptor_pb2.FileDescriptorProto:
    """With the comments of its source."""
    out = tmp_path_factory.mktemp("proto") / "set"
    arguments = [
        "protoc", f"-I{codegen.PROTO}", f"--descriptor_set_out={out}", "--include_source_info",
    ]  # fmt: skip
    assert protoc.main([*arguments, codegen.SOURCE]) == 0
    return descriptor_pb2.FileDescriptorSet.FromString(out.read_bytes()).file[0]


def test_names(file: descriptor_pb2.FileDescriptorProto) -> None:
    assert file.package == "expertmesh.v1" and file.name == "expertmesh/v1/engine.proto"
    for message in file.message_type:
        assert re.fullmatch(r"[A-Z][A-Za-z]+", message.name)
        for field in message.field:
            assert re.fullmatch(r"[a-z][a-z0-9_]*", field.name), f"{message.name}.{field.name}"
    (service,) = file.service
    for method in service.method:
        assert method.input_type == f".expertmesh.v1.{method.name}Request"
        assert method.output_type == f".expertmesh.v1.{method.name}Response"


def test_everything_has_a_comment(file: descriptor_pb2.FileDescriptorProto) -> None:
    commented = {
        tuple(location.path)
        for location in file.source_code_info.location
        if location.leading_comments.strip()
    }
    for number, message in enumerate(file.message_type):
        assert (4, number) in commented, message.name
        for position, field in enumerate(message.field):
            assert (4, number, 2, position) in commented, f"{message.name}.{field.name}"
    assert (6, 0) in commented
    for number, method in enumerate(file.service[0].method):
        assert (6, 0, 2, number) in commented, method.name


def test_an_unset_option_differs_from_its_zero() -> None:
    for message in (pb.SamplingParams, pb.GenerateRequest):
        for field in message.DESCRIPTOR.fields:
            assert field.has_presence or field.is_repeated, f"{message.__name__}.{field.name}"
