"""A process that tries to compile grammars: `python -m expertmesh.actors.constraint.worker`.

A grammar from outside can overflow the compiler's stack, which ends the process it runs in, or keep
it busy for a minute. So it is compiled here first. Frames on stdin and stdout: 4 bytes of length,
then msgpack; first the vocabulary, then constraints, each answered with the reason why it cannot be
compiled, "" if it can. The end of stdin is the end of the process.
"""

import resource
import signal
import sys
from typing import BinaryIO

import msgspec
from llguidance import LLTokenizer

from expertmesh.actors.constraint.compiler import TRIAL_STACK_BYTES, on_large_stack
from expertmesh.actors.constraint.matcher import compile_matcher
from expertmesh.actors.constraint.spec import Constraint, ConstraintError
from expertmesh.actors.constraint.vocabulary import Vocabulary, build

# Address space of the process: a grammar that wants more ends it instead of the machine.
MEMORY_BYTES = 4 << 30


def read_frame(stream: BinaryIO) -> bytes | None:
    """None at the end of the stream."""
    head = stream.read(4)
    return stream.read(int.from_bytes(head, "little")) if len(head) == 4 else None


def write_frame(stream: BinaryIO, data: bytes) -> None:
    stream.write(len(data).to_bytes(4, "little") + data)
    stream.flush()


def main() -> None:
    requests, answers = sys.stdin.buffer, sys.stdout.buffer
    # Ctrl-C in a terminal reaches this process too; answers that run may still need it.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    first = read_frame(requests)
    if first is None:
        return
    tokenizer = build(msgspec.msgpack.decode(first, type=Vocabulary))
    write_frame(answers, b"ready")
    while (frame := read_frame(requests)) is not None:
        constraint = msgspec.msgpack.decode(frame, type=Constraint)
        write_frame(answers, _verdict(tokenizer, constraint).encode())


def _verdict(tokenizer: LLTokenizer, constraint: Constraint) -> str:
    try:
        on_large_stack(lambda: compile_matcher(tokenizer, constraint), TRIAL_STACK_BYTES)
    except ConstraintError as error:
        return str(error)
    return ""


if __name__ == "__main__":
    main()
