"""mlx-lm on the CPU backend, with its own continuous-batching generator."""

from importlib.metadata import version
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx_lm.generate import BatchGenerator
from mlx_lm.utils import load_model
from protocol import Clock, serve


class Mlx:
    def __init__(self, options: dict[str, Any]) -> None:
        mx.set_default_device(mx.cpu)
        self.model, _ = load_model(Path(options["checkpoint"]))
        # Experts stay packed (mxfp4); the rest is fp32 as in the other systems.
        self.model.set_dtype(mx.float32)
        mx.eval(self.model.parameters())

    def facts(self) -> dict[str, Any]:
        return {
            "system": "mlx-lm",
            "versions": {name: version(name) for name in ("mlx-lm", "mlx", "mlx-cpu")},
            "weights": "float32, experts mxfp4",
            "threads": "mlx decides (it has no setting)",
        }

    def score(self, ids: list[int]) -> dict[str, list[Any]]:
        logits = self.model(mx.array([ids]), cache=self.model.make_cache())[0].astype(mx.float32)
        best = mx.argmax(logits, axis=-1)
        logprob = logits.max(axis=-1) - mx.logsumexp(logits, axis=-1)
        return {"argmax": best.tolist(), "logprob": logprob.tolist()}

    def generate(self, prompts: list[list[int]], new: int) -> dict[str, Any]:
        count = len(prompts)
        generator = BatchGenerator(
            self.model, max_tokens=new, completion_batch_size=count, prefill_batch_size=count
        )
        clock = Clock(count)
        order = {uid: at for at, uid in enumerate(generator.insert(prompts))}
        ids: list[list[int]] = [[] for _ in prompts]
        open_requests = count
        while open_requests:
            responses = generator.next_generated()
            for response in responses:
                ids[order[response.uid]].append(response.token)
            clock.ids(len(responses), sum(len(ids[order[r.uid]]) == 1 for r in responses))
            ended = sum(response.finish_reason is not None for response in responses)
            open_requests -= ended
            if ended:
                clock.finished()
        timing = clock.timing(ids)
        generator.close()
        return timing


if __name__ == "__main__":
    serve(Mlx)
