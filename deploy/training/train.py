"""Train the bundled model on CPU, by the clock.

`python -m expertmesh.deploy.training.train --work DIR --out DIR --minutes 90 [--resume]`

The schedule follows elapsed training seconds, so that the run ends on time on a busy machine.
Every batch is a pure function of (seed, step): a resumed run continues the same data stream.
"""

from __future__ import annotations

import argparse
import json
import random
import signal
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import tiktoken
import torch
from torch import Tensor

from expertmesh.deploy.training import optim, tasks, tokenizer
from expertmesh.deploy.training.model import NanoConfig, NanoK3
from expertmesh.deploy.training.replicas import Replicas, Unit, token_losses

GOLDEN = 0.6180339887498949


@dataclass(frozen=True)
class Recipe:
    """What a run does; `steps` replaces the clock when given (tests)."""

    minutes: float = 90.0
    steps: int = 0
    seed: int = 1
    lr: float = 4e-3
    weight_decay: float = 0.1
    corpus_rows: int = 3
    length: int = 512
    task_rows: int = 1
    task_share: float = 0.4
    recall_from: float = 0.3  # from here on, one corpus row makes room for a task row
    answers_from: float = 0.7  # ... and from here on another one
    late_task_share: float = 0.6
    quantise_from: float = 0.6
    long_from: float = 0.6
    balance_rate: float = 2e-3
    workers: int = 2
    unit_tokens: int = 1024


class Data:
    """Token stream of the training corpus plus the task generator."""

    def __init__(self, recipe: Recipe, stream: np.ndarray, enc: tiktoken.Encoding) -> None:
        self.recipe, self.stream, self.enc = recipe, stream, enc

    def filler(self, rng: random.Random, count: int) -> list[int]:
        start = rng.randrange(max(1, len(self.stream) - count))
        return self.stream[start : start + count].tolist()

    def extra(self, progress: float) -> int:
        """Rows moved from corpus to tasks, once the corpus has been seen about once."""
        return int(progress >= self.recipe.recall_from) + int(progress >= self.recipe.answers_from)

    def corpus(self, step: int, progress: float) -> tuple[Tensor, Tensor]:
        """ids [rows, length + 1] and weights; starts follow a golden-ratio walk, so that every
        part of the corpus is seen about equally often without keeping an epoch permutation."""
        recipe, length = self.recipe, self.recipe.length
        rows = recipe.corpus_rows - self.extra(progress)
        if progress > recipe.long_from and step % 4 == 0:
            rows, length = 1, length * 4
        span = len(self.stream) - length - 1
        picks = [
            int((recipe.seed * 0.137 + (step * recipe.corpus_rows + r) * GOLDEN) % 1 * span)
            for r in range(rows)
        ]
        ids = np.stack([self.stream[p : p + length + 1] for p in picks]).astype(np.int64)
        return torch.from_numpy(ids), torch.ones(rows, length + 1)

    def task(self, step: int, progress: float) -> tuple[Tensor, Tensor]:
        """ids [rows, length + 1] and weights; the first row's family decides the length."""
        rng = random.Random(self.recipe.seed * 1_000_003 + step)
        late = progress > self.recipe.long_from
        odds = (0.35, 0.42, 0.23) if late else (0.25, 0.35, 0.4)
        kinds = ("needle", "chat", "small")
        kind = rng.choices(kinds, odds)[0]
        total = self.recipe.length * (self.recipe.task_rows + self.extra(progress))
        if kind != "needle":
            length = rng.choice((128, 256, 256, 512))
        elif late:
            lengths = (128, 256, 512, 1024, 2048, 4096)
            length = rng.choices(lengths, (0.1, 0.2, 0.25, 0.2, 0.15, 0.1))[0]
        else:
            length = rng.choices((128, 256, 512), (0.5, 0.3, 0.2))[0]
        pairs = [
            tasks.row(
                self.enc, rng, length, rng.choices(kinds, odds)[0] if i else kind, self.filler
            )
            for i in range(max(1, total // length))
        ]
        ids, weights = zip(*pairs, strict=True)
        return torch.tensor(ids), torch.tensor(weights)


def load_stream(work: Path, name: str, enc: tiktoken.Encoding) -> np.ndarray:
    """All texts of `name`.json as one uint16 stream with [EOS] between works, cached."""
    cache = work / f"{name}.npy"
    if not cache.exists():
        eos = enc.encode_single_token("[EOS]")
        ids: list[int] = []
        for text in json.loads((work / f"{name}.json").read_text()):
            ids += [*enc.encode_ordinary(text), eos]
        np.save(cache, np.array(ids, dtype=np.uint16))
    return np.load(cache)


class Trainer:
    """Model, optimisers and position in the run; everything a checkpoint holds."""

    def __init__(self, cfg: NanoConfig, recipe: Recipe, data: Data) -> None:
        torch.manual_seed(recipe.seed)
        self.recipe, self.data = recipe, data
        self.model = NanoK3(cfg)
        self.muon, self.adam = optim.build(self.model)
        self.replicas = Replicas(self.model, recipe.workers)
        self.step, self.elapsed = 0, 0.0

    def progress(self) -> float:
        if self.recipe.steps:
            return self.step / self.recipe.steps
        return self.elapsed / (60.0 * self.recipe.minutes)

    def train_step(self) -> dict[str, float]:
        started = time.monotonic()
        recipe, progress = self.recipe, self.progress()
        scale = optim.rate(progress)
        for opt in (self.muon, self.adam):
            for group in opt.param_groups:
                group["lr"] = recipe.lr * scale
                group["weight_decay"] = recipe.weight_decay if opt is self.muon else 0.0
        self.replicas.load(progress >= recipe.quantise_from)
        corpus, task = self.data.corpus(self.step, progress), self.data.task(self.step, progress)
        late = progress >= recipe.answers_from
        share = recipe.late_task_share if late else recipe.task_share
        units = Unit.split("corpus", *corpus, 1 - share, recipe.unit_tokens)
        units += Unit.split("task", *task, share, recipe.unit_tokens)
        losses = self.replicas.backward(units)
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), 2.0)
        self.muon.step(pool=self.replicas.pool)
        self.adam.step()
        worst = self.model.balance_experts(recipe.balance_rate * scale)
        seconds = time.monotonic() - started
        self.step += 1
        self.elapsed += seconds
        tokens = sum(unit.ids[:, 1:].numel() for unit in units)
        return {
            "step": self.step, "minutes": self.elapsed / 60, "progress": progress,
            "corpus": losses["corpus"], "task": losses["task"], "length": task[0].shape[1] - 1,
            "grad": float(norm), "load": worst, "tokens_per_s": tokens / seconds,
        }  # fmt: skip

    def save(self, path: Path) -> None:
        state = {
            "model": self.model.state_dict(), "muon": self.muon.state_dict(),
            "adam": self.adam.state_dict(), "step": self.step, "elapsed": self.elapsed,
        }  # fmt: skip
        torch.save(state, path.with_suffix(".tmp"))
        path.with_suffix(".tmp").replace(path)

    def restore(self, path: Path) -> None:
        state = torch.load(path, weights_only=True)
        self.model.load_state_dict(state["model"])
        self.muon.load_state_dict(state["muon"])
        self.adam.load_state_dict(state["adam"])
        self.step, self.elapsed = state["step"], state["elapsed"]


def heldout_loss(net: NanoK3, stream: np.ndarray, bytes_per_token: float, rows: int) -> float:
    """Nats per byte on `rows` evenly spaced windows of 512 tokens."""
    net.eval()
    starts = np.linspace(0, len(stream) - 514, rows).astype(int)
    ids = torch.from_numpy(np.stack([stream[s : s + 513] for s in starts]).astype(np.int64))
    losses = [token_losses(net, part).detach() for part in ids.split(8)]
    return float(torch.cat(losses).mean()) / bytes_per_token


def run(trainer: Trainer, out: Path, held: np.ndarray, ratio: float, every: float) -> None:
    """Step until the budget is used, with a log line per 10 steps and regular checkpoints."""
    from rich.progress import Progress

    stop = []
    for sig in (signal.SIGTERM, signal.SIGINT):
        signal.signal(sig, lambda *_: stop.append(1))
    next_save = trainer.elapsed + every
    checkpoint, window = out / "checkpoint.pt", []
    with (out / "log.jsonl").open("a") as log, Progress() as bar:
        task = bar.add_task("training", total=1.0)
        while trainer.progress() < 1.0 and not stop:
            window.append(trainer.train_step())
            bar.update(task, completed=trainer.progress())
            if len(window) == 10:
                mean = {k: sum(w[k] for w in window) / 10 for k in window[0]}
                entry = window[-1] | {k: mean[k] for k in ("corpus", "task", "tokens_per_s")}
                log.write(json.dumps({k: round(v, 4) for k, v in entry.items()}) + "\n")
                log.flush()
                window.clear()
            if trainer.elapsed >= next_save:
                trainer.save(checkpoint)
                loss = heldout_loss(trainer.model, held, ratio, 32)
                log.write(json.dumps({"step": trainer.step, "heldout_nats_per_byte": loss}) + "\n")
                next_save = trainer.elapsed + every
    trainer.save(checkpoint)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--work", type=Path, required=True, help="folder with train/heldout.json")
    parser.add_argument("--out", type=Path, required=True, help="folder for checkpoints and log")
    parser.add_argument("--minutes", type=float, default=90.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--lr", type=float, default=4e-3)
    parser.add_argument("--resume", action="store_true")
    args = parser.parse_args()
    torch.set_flush_denormal(True)  # decay products underflow by design; denormals are slow
    args.out.mkdir(parents=True, exist_ok=True)
    if not (args.work / "tiktoken.model").exists():
        texts = json.loads((args.work / "train.json").read_text())
        tokenizer.save(tokenizer.train_bpe(texts + tokenizer.CHAT_SAMPLE), args.work)
    enc = tokenizer.load(args.work)
    recipe = Recipe(minutes=args.minutes, seed=args.seed, lr=args.lr)
    data = Data(recipe, load_stream(args.work, "train", enc), enc)
    held = load_stream(args.work, "heldout", enc)
    text = "".join(json.loads((args.work / "heldout.json").read_text()))
    ratio = len(text.encode()) / len(held)
    trainer = Trainer(NanoConfig(), recipe, data)
    if args.resume:
        trainer.restore(args.out / "checkpoint.pt")
    run(trainer, args.out, held, ratio, every=300.0)


if __name__ == "__main__":
    main()
