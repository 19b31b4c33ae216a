"""ExpertMesh against llama.cpp and mlx-lm on the same generated K3 checkpoint.

All systems compute in float32 outside the experts and may use every core. Experts: ours are stored
as mxfp4 and computed in float32; llama.cpp is measured with F32 experts (the same computation) and
with its MXFP4 (which rounds activations to 8 bits, so its answers differ); mlx-lm computes float32
with mxfp4 weights. `agreement` says how far each system's predictions are from ours on one text.
"""

import argparse
import subprocess
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np

from expertmesh.actors.model.config import load_config
from tests.bench import load, machine, models
from tests.bench.environments import LLAMACPP, MLX, TRANSFORMERS, folder_of, python_of
from tests.bench.systems import WORKERS, Command, Worker, alternate, expertmesh, ratios

TARGET = "ours / peer >= 1.0 at concurrency 16, >= 0.5 at 1"
PEERS = ("llamacpp_f32", "llamacpp_mxfp4", "mlx")
# One process with a thread per core and with one thread: either may be the faster one.
OURS = ("one_process", "one_process_1_thread", "two_tier")
SCORED_TOKENS = 96


def main(arguments: list[str]) -> dict[str, Any]:
    parser = argparse.ArgumentParser(prog="peers", description=__doc__)
    parser.add_argument("--model", default="wide")
    parser.add_argument("--peers", nargs="+", default=PEERS, choices=PEERS)
    parser.add_argument("--shapes", nargs="+", default=OURS)
    parser.add_argument("--concurrency", nargs="+", type=int, default=[1, 8, 16])
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--new", type=int, default=48, help="ids generated per request")
    options = parser.parse_args(arguments)
    folder = models.checkpoint(options.model)
    vocab = load_config(folder).vocab_size
    commands = {shape: _ours(folder, shape) for shape in options.shapes}
    commands |= {peer: command_of(peer, folder) for peer in options.peers}
    facts = machine.facts()
    with ExitStack() as stack:
        workers = {key: stack.enter_context(Worker(c)) for key, c in commands.items()}
        text = load.prompts(1, vocab, SCORED_TOKENS, seed=1)[0]
        scores = {key: worker.ask("score", ids=text) for key, worker in workers.items()}
        results = alternate(
            workers, vocab=vocab, concurrencies=options.concurrency,
            repetitions=options.repetitions, new=options.new,
        )  # fmt: skip
        systems = {key: worker.facts for key, worker in workers.items()}
    reference = scores[options.shapes[0]]
    return {
        "bench": "peers", "machine": facts, "target": TARGET, "model": str(folder),
        "options": vars(options), "systems": systems, "results": results,
        "agreement": {key: agreement(score, reference) for key, score in scores.items()},
        "ratios": {
            f"{shape} / {peer}": ratios(results, shape, peer)
            for shape in options.shapes for peer in options.peers
        },
    }  # fmt: skip


def _ours(folder: Path, shape: str) -> Command:
    threads = machine.cores() if shape == "one_process" else 1
    return expertmesh(folder, shape.removesuffix("_1_thread"), threads)


def command_of(peer: str, folder: Path) -> Command:
    """Makes the peer's environment and, for llama.cpp, its copy of the checkpoint if need be."""
    if peer == "mlx":
        argv = (python_of(MLX), str(WORKERS / "mlx_worker.py"))
        return Command(argv, machine.cores(), {"checkpoint": str(folder)})
    storage = peer.removeprefix("llamacpp_")
    python = python_of(LLAMACPP)
    gguf = folder.with_name(f"{folder.name}-{storage}.gguf")
    if not gguf.exists():
        converter = [python_of(TRANSFORMERS), str(WORKERS / "gguf_convert.py")]
        tree = folder_of(LLAMACPP) / "source" / "vendor" / "llama.cpp"
        subprocess.run([*converter, str(tree), str(folder), str(gguf), storage], check=True)
    return Command(
        (python, str(WORKERS / "llamacpp_worker.py")), machine.cores(),
        {"checkpoint": str(gguf), "storage": storage},
    )  # fmt: skip


def agreement(score: dict[str, Any], reference: dict[str, Any]) -> dict[str, float]:
    """Of the predictions at every position of one text."""
    same = np.equal(score["argmax"], reference["argmax"])
    apart = np.abs(np.subtract(score["logprob"], reference["logprob"]))
    return {
        "argmax_equal": round(float(same.mean()), 4),
        "top_logprob_difference_max": float(apart.max()),
        "top_logprob_difference_median": float(np.median(apart)),
    }
