"""Hugging Face transformers: `generate`, greedy, with its cache, in pure torch."""

import os
from importlib.metadata import version
from typing import Any

import torch
from protocol import Clock, serve
from transformers import AutoModelForCausalLM, LogitsProcessor, LogitsProcessorList


class Watch(LogitsProcessor):
    """Runs once per new id of all rows, changes nothing."""

    def __init__(self, clock: Clock) -> None:
        self.clock, self.calls = clock, 0

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.clock.ids(len(scores), first_of=0 if self.calls else len(scores))
        self.calls += 1
        return scores


class Transformers:
    def __init__(self, options: dict[str, Any]) -> None:
        torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
        self.model = AutoModelForCausalLM.from_pretrained(
            options["checkpoint"], dtype=torch.float32
        ).eval()
        self.model.generation_config.eos_token_id = None  # exactly `new` ids

    def facts(self) -> dict[str, Any]:
        return {
            "system": "transformers",
            "versions": {name: version(name) for name in ("transformers", "torch")},
            "weights": "float32",
            "threads": torch.get_num_threads(),
        }

    @torch.inference_mode()
    def score(self, ids: list[int]) -> dict[str, list[Any]]:
        logprobs = self.model(torch.tensor([ids])).logits[0].float().log_softmax(-1)
        best = logprobs.max(-1)
        return {"argmax": best.indices.tolist(), "logprob": best.values.tolist()}

    @torch.inference_mode()
    def generate(self, prompts: list[list[int]], new: int) -> dict[str, Any]:
        rows = torch.tensor(prompts)  # equal lengths: no padding, no mask to get wrong
        clock = Clock(len(prompts))
        out = self.model.generate(
            rows,
            attention_mask=torch.ones_like(rows),
            max_new_tokens=new,
            do_sample=False,
            pad_token_id=0,
            logits_processor=LogitsProcessorList([Watch(clock)]),
        )
        clock.finished()
        return clock.timing(out[:, rows.shape[1] :].tolist())


if __name__ == "__main__":
    serve(Transformers)
