"""Python code of the protocol: `python -m expertmesh.deploy.rpc.codegen --write` or `--check`.

The generated files are committed, so that serving needs no compiler. Making them needs the dev
dependencies (grpcio-tools, mypy-protobuf), whose versions are pinned: others write other text.
"""

import argparse
import sys
import tempfile
from pathlib import Path

FOLDER = Path(__file__).parent
PROTO = FOLDER / "proto"
GENERATED = FOLDER / "v1"
SOURCE = "expertmesh/v1/engine.proto"

# protoc imports by the folder of the .proto; the modules live in this package.
_IMPORTS = (
    ("from expertmesh.v1 import", "from expertmesh.deploy.rpc.v1 import"),
    ("import expertmesh.v1.engine_pb2", "import expertmesh.deploy.rpc.v1.engine_pb2"),
    ("expertmesh.v1.engine_pb2.", "expertmesh.deploy.rpc.v1.engine_pb2."),
)


def generate() -> dict[str, str]:
    """Text of each generated file by name. Raises RuntimeError when the compiler refuses."""
    from grpc_tools import protoc

    programs = Path(sys.executable).parent
    with tempfile.TemporaryDirectory() as out:
        arguments = [
            "protoc",
            f"-I{PROTO}",
            f"--plugin=protoc-gen-mypy={programs / 'protoc-gen-mypy'}",
            f"--plugin=protoc-gen-mypy_grpc={programs / 'protoc-gen-mypy_grpc'}",
            f"--python_out={out}",
            f"--grpc_python_out={out}",
            f"--mypy_out=quiet:{out}",
            f"--mypy_grpc_out=quiet:{out}",
            SOURCE,
        ]
        if protoc.main(arguments):
            raise RuntimeError(f"protoc refused {SOURCE}")
        made = sorted((Path(out) / SOURCE).parent.iterdir())
        return {path.name: _in_this_package(path.read_text()) for path in made}


def _in_this_package(text: str) -> str:
    for line, replacement in _IMPORTS:
        text = text.replace(line, replacement)
    return text


def stale() -> list[str]:
    """Names of generated files that are not what the compiler makes of the .proto now."""
    made = generate()
    have = {path.name for path in GENERATED.glob("engine_pb2*")}
    return sorted(
        name
        for name in made.keys() | have
        if name not in made or name not in have or (GENERATED / name).read_text() != made[name]
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    mode = parser.add_mutually_exclusive_group(required=True)
    mode.add_argument("--write", action="store_true", help="make the files")
    mode.add_argument("--check", action="store_true", help="exit with 1 when one is stale")
    if parser.parse_args().write:
        for name, text in generate().items():
            (GENERATED / name).write_text(text)
        return 0
    wrong = stale()
    for name in wrong:
        print(f"stale: {GENERATED / name}", file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
