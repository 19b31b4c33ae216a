"""llama.cpp through llama-cpp-python's C interface: one batch over all sequences per step.

The package's own `Llama` class serves one sequence at a time; the C interface is what llama.cpp's
server uses, so concurrency is measured at its best.
"""

import ctypes
import os
from importlib.metadata import version
from typing import Any

import llama_cpp as ll
import numpy as np
from protocol import Clock, serve

CONTEXT_TOKENS = 1024  # of each sequence


@ll.llama_log_callback
def _quiet(level: int, text: bytes, data: Any) -> None:
    """The default prints a page per context."""


class LlamaCpp:
    def __init__(self, options: dict[str, Any]) -> None:
        self.threads = int(os.environ["OMP_NUM_THREADS"])
        self.storage = options["storage"]
        ll.llama_log_set(_quiet, ctypes.c_void_p(0))
        ll.llama_backend_init()
        self.model = ll.llama_model_load_from_file(
            options["checkpoint"].encode(), ll.llama_model_default_params()
        )
        if not self.model:
            raise RuntimeError(f"cannot load {options['checkpoint']}")
        self.vocab = ll.llama_vocab_n_tokens(ll.llama_model_get_vocab(self.model))
        self.contexts: dict[int, Any] = {}

    def facts(self) -> dict[str, Any]:
        return {
            "system": "llama.cpp",
            "versions": {"llama-cpp-python": version("llama-cpp-python")},
            "weights": f"float32, experts {self.storage}",
            "threads": self.threads,
            "system_info": ll.llama_print_system_info().decode(),
        }

    def score(self, ids: list[int]) -> dict[str, list[Any]]:
        context = self._context(1)
        rows = self._decode(context, [(0, at, token) for at, token in enumerate(ids)], every=True)
        logits = np.stack(rows).astype(np.float64)
        best = logits.argmax(-1)
        top = logits.max(-1)
        logprob = -np.log(np.exp(logits - top[:, None]).sum(-1))
        return {"argmax": best.tolist(), "logprob": logprob.tolist()}

    def generate(self, prompts: list[list[int]], new: int) -> dict[str, Any]:
        context = self._context(len(prompts))
        clock = Clock(len(prompts))
        ids: list[list[int]] = []
        for sequence, prompt in enumerate(prompts):
            rows = self._decode(context, [(sequence, at, token) for at, token in enumerate(prompt)])
            ids.append([int(rows[-1].argmax())])
            clock.ids(1, first_of=1)
        for step in range(1, new):
            batch = [
                (sequence, len(prompt) + step - 1, ids[sequence][-1])
                for sequence, prompt in enumerate(prompts)
            ]
            for sequence, row in enumerate(self._decode(context, batch, every=True)):
                ids[sequence].append(int(row.argmax()))
            clock.ids(len(prompts))
        clock.finished()
        return clock.timing(ids)

    def _context(self, sequences: int) -> Any:
        """An empty context for that many sequences; kept, since making one is slow."""
        if sequences not in self.contexts:
            params = ll.llama_context_default_params()
            params.n_ctx = CONTEXT_TOKENS * sequences
            params.n_batch = params.n_ubatch = CONTEXT_TOKENS
            params.n_seq_max = sequences
            params.n_threads = params.n_threads_batch = self.threads
            params.no_perf = True
            self.contexts[sequences] = ll.llama_init_from_model(self.model, params)
        context = self.contexts[sequences]
        ll.llama_memory_clear(ll.llama_get_memory(context), True)
        return context

    def _decode(
        self, context: Any, tokens: list[tuple[int, int, int]], every: bool = False
    ) -> list[np.ndarray[Any, Any]]:
        """tokens: (sequence, position, id). Logits of every token, or of the last one only."""
        batch = ll.llama_batch_init(len(tokens), 0, 1)
        batch.n_tokens = len(tokens)
        for at, (sequence, position, token) in enumerate(tokens):
            batch.token[at], batch.pos[at] = token, position
            batch.n_seq_id[at], batch.seq_id[at][0] = 1, sequence
            batch.logits[at] = every or at == len(tokens) - 1
        status = ll.llama_decode(context, batch)
        ll.llama_batch_free(batch)
        if status:
            raise RuntimeError(f"llama_decode returned {status}")
        wanted = range(len(tokens)) if every else [len(tokens) - 1]
        return [self._row(context, at) for at in wanted]

    def _row(self, context: Any, at: int) -> np.ndarray[Any, Any]:
        pointer = ll.llama_get_logits_ith(context, at)
        return np.ctypeslib.as_array(pointer, (self.vocab,)).copy()


if __name__ == "__main__":
    serve(LlamaCpp)
