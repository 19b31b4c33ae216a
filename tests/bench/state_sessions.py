"""Suspend and resume through process death: `python -m tests.bench state_sessions`.

A child process runs conversations of many lengths with a small real model (KDA and MLA, float32),
goes on with a fork of each, whose logits it notes, suspends each, and is killed with SIGKILL. A new
process resumes them all and goes on: every logits row must be what the fork's was, bit by bit, with
nothing computed again (kv-state 5, G2). Restoring is timed against reading as many bytes from the
same files with pread.
"""

import json
import os
import random
import signal
import subprocess
import sys
import tempfile
from argparse import ArgumentParser
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import torch

from tests.support.session_engine import SessionEngine
from tests.support.state_model import VOCAB, small_model

TURN, NEXT = 24, 64  # tokens of the first answer, and of the one that is compared
LONGEST = 131_072


def lengths(count: int, longest: int, seed: int) -> list[int]:
    """Of the prompts: most of them short, evenly in the logarithm up to `longest`, ascending."""
    rng = random.Random(seed)
    least, most = 10, max(10, (longest - 1).bit_length())
    drawn = [int(2 ** rng.uniform(least, min(most, least + 1.5))) for _ in range(count)]
    steps = range(least, most + 1)
    for at, power in enumerate(steps):  # and each power of two up to the longest
        drawn[at % count] = min(2**power, longest - TURN - NEXT - 16)
    return sorted(drawn)


def prompt_of(number: int, length: int) -> list[int]:
    rng = random.Random(number)
    return [rng.randrange(VOCAB) for _ in range(length)]


def second_turn(number: int, length: int, answer: Sequence[int]) -> list[int]:
    rng = random.Random(-number)
    return [*prompt_of(number, length), *answer, *(rng.randrange(VOCAB) for _ in range(16))]


def open_engine(folder: Path, layers: int, longest: int) -> SessionEngine:
    pages = 4 * (longest // 64 + 4)
    return SessionEngine(
        small_model(layers), folder / "state", pages=pages, slots=4, host_bytes=1 << 30,
        disk_bytes=8 << 30, step_tokens=2048,
    )  # fmt: skip


def save(folder: Path, plan: Sequence[tuple[int, int]], layers: int, longest: int) -> None:
    """The first process. Says when each session is safe, and then waits to be killed."""
    server = open_engine(folder, layers, longest)
    for number, length in plan:
        name = f"s{number}"
        answer, _ = server.turn(name, prompt_of(number, length), TURN, name)
        server.rows(name)
        server.ask("fork", name, "uninterrupted")
        ids, cached = server.turn(
            "fork", second_turn(number, length, answer), NEXT, "uninterrupted"
        )
        rows = server.rows("fork")
        server.ask("delete", "uninterrupted")
        report = server.ask("suspend", name).suspended
        assert report is not None and cached == length + TURN - 1
        note = {"number": number, "length": length, "answer": answer, "ids": ids, "rows": rows,
                "suspend_s": report.seconds, "bytes": report.bytes}  # fmt: skip
        print(json.dumps(note), flush=True)
    signal.pause()


def resume(folder: Path, layers: int, longest: int) -> None:
    """The second process: reads the first one's notes from stdin, prints what became of each."""
    small_model(layers)
    began = perf_counter()
    server = open_engine(folder, layers, longest)
    views = server.ask("list").views
    assert views is not None
    start = {"opened_s": perf_counter() - began, "sessions": len(views)}
    print(json.dumps(start), flush=True)
    files = sorted((folder / "state").rglob("*.seg"), key=lambda file: file.stat().st_size)
    for line in sys.stdin:
        note = json.loads(line)
        number, name = note["number"], f"s{note['number']}"
        drop_caches(folder / "state")
        report = server.ask("resume", name).resumed
        assert report is not None
        drop_caches(folder / "state")
        read_s = plain_read(files, report.bytes)
        prompt = second_turn(number, note["length"], note["answer"])
        ids, cached = server.turn(name, prompt, NEXT, name)
        rows = [list(row) for row in server.rows(name)]
        print(
            json.dumps(
                {
                    "number": number,
                    "same": rows == note["rows"] and ids == note["ids"],
                    "restored": report.restored_tokens,
                    # It may begin behind the session's end, where the fork's prompt has left a
                    # snapshot on disk: the same conversation, and the same names.
                    "recomputed": max(0, note["length"] + TURN - 1 - cached),
                    "beyond": cached > note["length"] + TURN - 1,
                    "bytes": report.bytes,
                    "load_ms": report.load_ms,
                    "verify_ms": report.verify_ms,
                    "read_ms": 1e3 * read_s,
                }
            ),
            flush=True,
        )
    os.kill(os.getpid(), signal.SIGKILL)  # nothing is closed in an orderly way here either


def drop_caches(folder: Path) -> None:
    """So that what follows comes from the disk."""
    for file in folder.rglob("*"):
        if file.is_file():
            handle = os.open(file, os.O_RDONLY)
            os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(handle)


def plain_read(files: Sequence[Path], count: int) -> float:
    """Seconds for so many bytes in reads of 1 MiB."""
    block, began = bytearray(1 << 20), perf_counter()
    for file in reversed(files):
        handle, at = os.open(file, os.O_RDONLY), 0
        while count > 0 and (got := os.preadv(handle, [memoryview(block)[:count]], at)):
            at, count = at + got, count - got
        os.close(handle)
        if count <= 0:
            break
    return perf_counter() - began


def child(role: str, folder: Path, options: Any, plan: Any, **pipes: Any) -> Any:
    command = [sys.executable, "-m", "tests.bench", "state_sessions", "--role", role,
               "--folder", str(folder), "--layers", str(options.layers),
               "--longest", str(options.longest), "--plan", json.dumps(plan)]  # fmt: skip
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, **pipes)


def main(arguments: list[str]) -> dict[str, Any]:
    parser = ArgumentParser(prog="python -m tests.bench state_sessions")
    parser.add_argument("--sessions", type=int, default=1000)
    parser.add_argument("--longest", type=int, default=LONGEST, help="tokens")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--each", type=int, default=100, help="sessions between two kills")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", type=Path, help="of the disk tier; default: a temporary one")
    parser.add_argument("--role", choices=("save", "resume"), help="of a child process")
    parser.add_argument("--plan", type=json.loads, default=[])
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    if options.role == "save":
        save(options.folder, options.plan, options.layers, options.longest)
    elif options.role == "resume":
        resume(options.folder, options.layers, options.longest)
    plan = list(enumerate(lengths(options.sessions, options.longest, options.seed)))
    notes, results, opened = list[Any](), list[Any](), list[Any]()
    began = perf_counter()
    for at in range(0, len(plan), options.each):
        with tempfile.TemporaryDirectory(dir=options.folder) as folder:
            part = one_death(Path(folder), plan[at : at + options.each], options)
        for whole, some in zip((notes, results, opened), part, strict=True):
            whole += some
    return summary(notes, results, opened) | {"seconds": perf_counter() - began}


def one_death(folder: Path, plan: Any, options: Any) -> tuple[list[Any], list[Any], list[Any]]:
    saving = child("save", folder, options, plan)
    try:
        notes = [json.loads(saving.stdout.readline()) for _ in plan]
    finally:
        saving.kill()
        saving.wait()
    resuming = child("resume", folder, options, [], stdin=subprocess.PIPE)
    text, _ = resuming.communicate("".join(json.dumps(note) + "\n" for note in notes))
    opened, *results = [json.loads(line) for line in text.splitlines()]
    assert resuming.returncode == -signal.SIGKILL
    return notes, results, [opened]


def summary(notes: list[Any], results: list[Any], opened: list[Any]) -> dict[str, Any]:
    allowed = [one["load_ms"] <= 1.25 * one["read_ms"] + 10 for one in results]
    sizes = [note["length"] for note in notes]
    ratios = [one["load_ms"] / one["read_ms"] for one in results if one["bytes"]]
    largest = sorted(zip(sizes, results, strict=True), key=lambda pair: pair[0])[-8:]
    return {
        "sessions": len(results),
        "kills": 2 * len(opened),
        "tokens": {"least": min(sizes), "median": median(sizes), "most": max(sizes)},
        "rows_compared": NEXT * len(results),
        "identical": sum(one["same"] for one in results),
        "restored_nothing": sum(not one["restored"] for one in results),
        "began_beyond_the_session": sum(one["beyond"] for one in results),
        "recomputed_tokens": sum(one["recomputed"] for one in results),
        "within_time": sum(allowed),
        "load_over_pread": {"median": median(ratios), "worst": max(ratios)},
        "verify_share": sum(one["verify_ms"] for one in results)
        / sum(one["load_ms"] for one in results),
        "suspend_s": {"median": median(note["suspend_s"] for note in notes),
                      "worst": max(note["suspend_s"] for note in notes)},
        "open_and_list_s": max(one["opened_s"] for one in opened),
        "largest": [{"tokens": size} | one for size, one in largest],
    }  # fmt: skip
