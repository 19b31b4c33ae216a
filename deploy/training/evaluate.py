"""Measure a model folder: held-out loss in nats per byte and needle recall by length.

`python -m expertmesh.deploy.training.evaluate --work DIR --model FOLDER [--checkpoint FILE]`

With `--checkpoint` the loss of the unpacked weights is reported beside that of the folder.
"""

from __future__ import annotations

import argparse
import json
import lzma
import random
from pathlib import Path

import numpy as np
import tiktoken
import torch

from expertmesh.deploy.training import chat, export, tasks, tokenizer
from expertmesh.deploy.training.model import NanoConfig, NanoK3
from expertmesh.deploy.training.replicas import token_losses

LENGTHS = (512, 1024, 2048, 4096)


@torch.no_grad()
def corpus_loss(
    model: NanoK3, texts: list[str], enc: tiktoken.Encoding, window: int
) -> tuple[float, float]:
    """(nats per byte, nats per token) over all of `texts`, in windows that start without context.

    The first token of a window is not predicted, so its bytes are not counted either.
    """
    nats, count, size = 0.0, 0, 0
    for text in texts:
        ids = enc.encode_ordinary(text)
        for start in range(0, len(ids) - 2, window):
            part = ids[start : start + window + 1]
            nats += float(token_losses(model, torch.tensor([part])).sum())
            count += len(part) - 1
            size += len(enc.decode_bytes(part[1:]))
    return nats / size, nats / count


@torch.no_grad()
def greedy_matches(model: NanoK3, prompt: list[int], answer: list[int]) -> bool:
    """Whether greedy decoding after `prompt` gives exactly `answer` (one forward pass)."""
    logits = model(torch.tensor([prompt + answer[:-1]]))[0, len(prompt) - 1 :]
    return logits.argmax(-1).tolist() == answer


def recall_prompt(
    enc: tiktoken.Encoding, rng: random.Random, length: int, held: np.ndarray, as_chat: bool
) -> tuple[list[int], list[int]]:
    """One fact in `length` tokens of held-out text at a random depth; (prompt ids, answer ids)."""
    statement, question, answer = tasks.needle_facts(rng, 1)[0]
    head, value = answer.rsplit(" is ", 1)
    room = length - 120
    start = rng.randrange(len(held) - room)
    text = held[start : start + room].tolist()
    cut = int(rng.random() * room)
    doc = tasks.Doc(enc)
    if as_chat:
        body = f"{enc.decode(text[:cut])}\n\n{statement}\n\n{enc.decode(text[cut:])}\n\n{question}"
        chat.message(doc, "user", body)
        chat.tag(chat.tag(doc, "message", role="assistant"), "response").text(f"{head} is")
    else:
        doc.tokens(text[:cut]).text(f"\n\n{statement}\n\n").tokens(text[cut:])
        doc.text(f"\n\nQuestion: {question}\n\nAnswer: ").text(f"{head} is")
    return doc.ids, enc.encode_ordinary(f" {value}")


def recall(
    model: NanoK3, enc: tiktoken.Encoding, held: np.ndarray, length: int, trials: int, as_chat: bool
) -> float:
    """Share of facts given back exactly, at about `length` tokens of context."""
    rng = random.Random(length)
    prompts = [recall_prompt(enc, rng, length, held, as_chat) for _ in range(trials)]
    return sum(greedy_matches(model, p, a) for p, a in prompts) / trials


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--work", type=Path, required=True, help="folder with heldout.json")
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--checkpoint", type=Path)
    parser.add_argument("--trials", type=int, default=50, help="per length (half at 4096)")
    parser.add_argument("--window", type=int, default=1024)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    torch.set_flush_denormal(True)
    enc, model = tokenizer.load(args.model), export.load_folder(args.model)
    texts = json.loads((args.work / "heldout.json").read_text())
    held = np.array(enc.encode_ordinary("\n\n".join(texts)))
    report: dict[str, object] = {}
    per_byte, per_token = corpus_loss(model, texts, enc, args.window)
    report["packed"] = {"nats_per_byte": per_byte, "nats_per_token": per_token}
    if args.checkpoint:
        plain = NanoK3(NanoConfig()).eval()
        plain.load_state_dict(torch.load(args.checkpoint, weights_only=True)["model"])
        per_byte, per_token = corpus_loss(plain, texts, enc, args.window)
        report["unpacked"] = {"nats_per_byte": per_byte, "nats_per_token": per_token}
    for form, as_chat in (("plain", False), ("chat", True)):
        report[f"recall_{form}"] = {
            n: recall(model, enc, held, n, args.trials // (1 + (n >= 4096)), as_chat)
            for n in LENGTHS
        }
    train = "".join(json.loads((args.work / "train.json").read_text()))
    report["xz_nats_per_byte"] = xz(train + "".join(texts))
    text = json.dumps(report, indent=2)
    print(text)
    if args.out:
        args.out.write_text(text + "\n")


def xz(text: str) -> float:
    """Size under `xz -9e`, in nats per byte."""
    raw = text.encode()
    packed = lzma.compress(raw, preset=9 | lzma.PRESET_EXTREME)
    return float(len(packed) * 8 * np.log(2) / len(raw))


if __name__ == "__main__":
    main()
