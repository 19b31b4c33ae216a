"""Memory of one sequence against its length: what is accounted for, and what the system says.

Each length and mode is measured in a process of its own, so that nothing is left from another.
"""

import gc
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
import torch

from expertmesh.actors.attention.settings import EngineSettings
from expertmesh.actors.state.offload.context import far_pages
from expertmesh.actors.state.pages import pages_for
from expertmesh.actors.state.settings import LEAST_DISK_BYTES, StateSettings
from expertmesh.deploy.bench.tiers_resident import Resident
from expertmesh.deploy.eval.driver import Driver
from expertmesh.deploy.eval.subject import Subject

STEP_TOKENS = 512
ANSWER_TOKENS = 16
DISK = "+disk"
MODES = ("exact", "offload", "offload" + DISK, "select", "select" + DISK)
# Of the old pages, what host memory has room for where there is a disk below it; and at least so
# many pages, of which the newest make no piece yet.
HOST_SHARE, LEAST_PAGES = 1 / 8, 32
PIECE_TOKENS = 1024


class Memory(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes of a prompt of so many tokens and an answer.

    mode: with DISK where host memory has room for HOST_SHARE of the old pages. latents to scratch,
    host, disk: see Resident. slot: KDA state. full: latents of an exact sequence of
    this length. share: (near + index + recent) / full. pss: proportional set size at the last step,
    peak_pss the largest of all steps, both beyond that of the same process before the prompt.
    token_s: of an answer's token after the first.
    """

    mode: str
    tokens: int
    latents: int
    near: int
    index: int
    recent: int
    scratch: int
    slot: int
    host: int
    disk: int
    full: int
    share: float
    pss: int
    peak_pss: int
    seconds: float
    token_s: float


def memory(
    model: Path,
    lengths: Sequence[int],
    window: int = 1024,
    pages: int = 16,
    told: Callable[[str], None] = lambda line: None,
) -> list[Memory]:
    """window, pages: StateSettings.window_tokens and select_pages. Raises RuntimeError when a
    process fails, with what it said."""
    found = []
    for mode in MODES:
        for tokens in lengths:
            order = {
                "model": str(model), "mode": mode, "tokens": tokens, "window": window,
                "pages": pages,
            }  # fmt: skip
            found.append(_in_a_process(order))
            told(f"memory, {mode} at {tokens}: {found[-1].share:.1%} of all latents resident")
    return found


def _in_a_process(order: dict[str, object]) -> Memory:
    command = [sys.executable, "-m", "expertmesh.deploy.bench.tiers_memory", json.dumps(order)]
    done = subprocess.run(command, capture_output=True, env=os.environ | {"OMP_NUM_THREADS": "1"})
    if done.returncode:
        raise RuntimeError(f"measuring {order}: {done.stderr.decode()[-2000:]}")
    return msgspec.json.decode(done.stdout, type=Memory)


def pss_bytes() -> int:
    """Of this process; shared pages count by their share."""
    for line in Path("/proc/self/smaps_rollup").read_text().splitlines():
        if line.startswith("Pss:"):
            return int(line.split()[1]) << 10
    raise RuntimeError("/proc/self/smaps_rollup does not tell a Pss")


def measure(subject: Subject, mode: str, tokens: int, window: int, pages: int) -> Memory:
    """In this process, which should be new."""
    with tempfile.TemporaryDirectory() as folder:
        state = StateSettings.model_validate(
            {"prefix_cache": False, "host_bytes": 0, "kv_mode": mode.removesuffix(DISK),
             "window_tokens": window, "select_pages": pages}
        )  # fmt: skip
        if mode.endswith(DISK):
            far = far_pages(state, tokens + ANSWER_TOKENS)
            room = {
                "offload_bytes": max(LEAST_PAGES, int(far * HOST_SHARE)) * subject.page_bytes,
                "offload_disk_bytes": 2 * far * subject.page_bytes,
                "offload_disk_tokens": PIECE_TOKENS,
                "disk": Path(folder), "disk_bytes": LEAST_DISK_BYTES,
            }  # fmt: skip
            state = state.model_copy(update=room)
        return _measure(subject, state, mode, tokens)


def _measure(subject: Subject, state: StateSettings, mode: str, tokens: int) -> Memory:
    near = pages_for(state.sink_tokens + state.window_tokens + STEP_TOKENS) + 2
    whole = pages_for(tokens + ANSWER_TOKENS)
    settings = EngineSettings(
        pages=whole if mode == "exact" else min(whole, near), slots=2, step_tokens=STEP_TOKENS,
        state=state,
    )  # fmt: skip
    with subject.engine(settings) as engine:
        Driver(engine).one(subject.random_prompt("warm", min(tokens, STEP_TOKENS)), 2)
        gc.collect()
        before, sizes, most = pss_bytes(), list[int](), Resident()

        def watch() -> None:
            sizes.append(pss_bytes())
            most.look(engine)

        timed = Driver(engine, watch).one(subject.random_prompt("memory", tokens), ANSWER_TOKENS)
        gc.collect()
        full = pages_for(tokens + ANSWER_TOKENS - 1) * engine.state.page_bytes
        return Memory(
            mode=mode, tokens=tokens, latents=most.latents, near=most.near, index=most.index,
            recent=most.recent, scratch=most.scratch, slot=engine.state.slot_bytes, host=most.host,
            disk=most.disk, full=full, share=most.answering / full, pss=sizes[-1] - before,
            peak_pss=max(sizes) - before, seconds=timed.last_s,
            token_s=(timed.last_s - timed.first_s) / (ANSWER_TOKENS - 1),
        )  # fmt: skip


if __name__ == "__main__":
    order = json.loads(sys.argv[1])
    torch.set_num_threads(1)
    subject = Subject(Path(order.pop("model")), order["tokens"] + ANSWER_TOKENS)
    print(msgspec.json.encode(measure(subject, **order)).decode())
