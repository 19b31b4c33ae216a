"""What constrained decoding costs per token at K3's vocabulary: `python -m tests.bench masks`.

163,840 made-up tokens (words, numbers, punctuation, Han, runs of spaces) stand in for K3's. Each
row follows a grammar with the likeliest of random logits, as a model of random weights would.
Microseconds of the thread's CPU time, which other work on the machine hardly stretches.
"""

import json
import random
from argparse import ArgumentParser
from time import perf_counter, thread_time
from typing import Any

import numpy as np

from expertmesh.actors.attention.masks import expand
from expertmesh.actors.constraint.compiler import Grammars
from expertmesh.actors.constraint.matcher import words_for
from expertmesh.actors.constraint.spec import Constraint
from expertmesh.actors.constraint.vocabulary import Vocabulary
from tests.support.constraints import grammars_of

VOCAB, RANKS = 163_840, 163_584
END = RANKS + 2
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "age": {"type": "integer", "minimum": 0},
        "tags": {"type": "array", "items": {"type": "string"}},
        "address": {
            "type": "object",
            "properties": {"street": {"type": "string"}, "zip": {"pattern": "^[0-9]{5}$"}},
            "required": ["street", "zip"],
            "additionalProperties": False,
        },
    },
    "required": ["name", "age", "tags", "address"],
    "additionalProperties": False,
}
CASES = {
    "json_schema": Constraint("json_schema", json.dumps(PERSON)),
    "json_object": Constraint("json_schema", '{"type": "object"}'),
    "choice of 1000": Constraint("choice", json.dumps([f"word {i * 7919}" for i in range(1000)])),
    "regex of letters": Constraint("regex", "[a-z ]{5,300}(foo|bar)+"),
    "grammar": Constraint(
        "grammar", 'start: e\ne: t ("+" t)*\nt: /[0-9]{1,9}/ | /[a-z]+/ "(" e ")"'
    ),
}


def vocabulary() -> Vocabulary:
    """K3's sizes; the same at every call."""
    rng = random.Random(0)
    letters, weights = "etaoinshrdlucmfwypvbgkjqxz", [1 / (i + 1) for i in range(26)]
    han = [chr(code) for code in range(0x4E00, 0x6000)]

    def word() -> str:
        kind = rng.random()
        if kind < 0.7:
            space = " " if rng.random() < 0.5 else ""
            return space + "".join(rng.choices(letters, weights, k=rng.randint(2, 9)))
        if kind < 0.74:
            return "".join(rng.choices("0123456789", k=rng.randint(1, 3)))
        if kind < 0.82:
            return "".join(rng.choices("(){}[]<>.,;:\"'/\\-_=+*! \n\t", k=rng.randint(2, 6)))
        if kind < 0.97:
            return "".join(rng.choices(han, k=rng.randint(1, 4)))
        return " " * rng.randint(1, 80)

    tokens = dict.fromkeys(bytes([byte]) for byte in range(256))
    while len(tokens) < RANKS:
        tokens[word().encode()] = None
    special = [f"<|reserved_token_{i}|>".encode() for i in range(RANKS, VOCAB)]
    return Vocabulary([*tokens, *special], RANKS, [END])


def measure(grammars: Grammars, constraint: Constraint, steps: int) -> dict[str, Any]:
    rng = np.random.default_rng(0)
    words = np.zeros((1, words_for(VOCAB)), dtype=np.int32)
    bias = np.zeros((1, VOCAB), dtype=np.float32)
    parts: dict[str, list[float]] = {"mask": [], "expand": [], "apply": [], "accept": []}

    def since(start: float, part: str) -> None:
        parts[part].append((thread_time() - start) * 1e6)

    start = perf_counter()  # compiling has a thread of its own
    matcher = grammars.matcher(constraint, []).result()
    compile_ms = (perf_counter() - start) * 1e3
    for _ in range(steps):
        logits = rng.standard_normal(VOCAB, dtype=np.float32)
        start = thread_time()
        matcher.fill(words[0])
        since(start, "mask")
        start = thread_time()
        expand(words, bias)
        since(start, "expand")
        start = thread_time()
        np.add(logits, bias[0], out=logits)
        since(start, "apply")
        token = int(logits.argmax())
        if token == END:
            matcher = grammars.matcher(constraint, []).result()
            continue
        start = thread_time()
        matcher.accept([token])
        since(start, "accept")
    shown = {name: {"p50": _at(each, 0.5), "mean": round(sum(each) / len(each), 1),
                    "p99": _at(each, 0.99)} for name, each in parts.items()}  # fmt: skip
    return {"compile_ms": round(compile_ms, 1), "us": shown}


def _at(values: list[float], share: float) -> float:
    return round(sorted(values)[min(len(values) - 1, int(len(values) * share))], 1)


def main(arguments: list[str]) -> dict[str, Any]:
    parser = ArgumentParser(prog="python -m tests.bench masks")
    parser.add_argument("--steps", type=int, default=300, help="tokens per grammar")
    options = parser.parse_args(arguments)
    grammars, start = grammars_of(vocabulary()), thread_time()
    grammars.matcher(Constraint("regex", "a"), []).result()
    found: dict[str, Any] = {"vocabulary_ms": round((thread_time() - start) * 1e3)}
    for name, constraint in CASES.items():
        found[name] = measure(grammars, constraint, options.steps)
    return found
