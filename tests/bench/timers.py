"""Where the time of a step goes: exclusive seconds by part, from wrappers around the parts.

A profiler that records every operator costs as much as the operators of a small model; a wrapper
around a layer's part costs about a microsecond. Nested parts are subtracted from the outer one.
Both clocks are read: on a machine with other work, the thread's CPU time is what the part costs
and the wall time is what it took.
"""

import functools
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from time import perf_counter, thread_time
from typing import Any
from unittest import mock

from expertmesh.actors.attention import engine as engine_module
from expertmesh.actors.exchange import mesh
from expertmesh.actors.exchange.base import LocalExchange
from expertmesh.actors.experts.bank import ExpertBank
from expertmesh.actors.model.forward import Forward
from expertmesh.actors.model.layers import Gated, Kda, Mla, Router
from expertmesh.actors.model.model import LatentMoe, Model
from expertmesh.actors.model.residual import BlockResidual, PlainResidual

# (owner, attribute, part): methods that are one part each. Experts are computed inside the local
# exchange's dispatch; with a mesh the wait for them is `exchange: wait`.
_PARTS: list[tuple[Any, str, str]] = [
    (engine_module.Engine, "_receive", "engine: plan"),
    (engine_module.Scheduler, "plan", "engine: plan"),
    (engine_module.Engine, "_sample", "engine: sample"),
    (engine_module.Engine, "_publish", "engine: publish"),
    (Model, "forward", "forward: glue"),
    (Forward, "advance", "forward: glue"),
    (Kda, "__call__", "attention: KDA"),
    (Mla, "__call__", "attention: MLA"),
    (Gated, "__call__", "shared experts, dense"),
    (Router, "__call__", "router"),
    (LatentMoe, "latent", "latent projections"),
    (LatentMoe, "finish", "latent projections"),
    (LocalExchange, "dispatch", "exchange: local"),
    (ExpertBank, "partial_sum", "experts"),
    (mesh.MeshExchange, "begin_step", "exchange: open"),
    (mesh.MeshExchange, "dispatch", "exchange: send"),
    (mesh.MeshExchange, "_land", "exchange: wait"),
    (mesh.MeshExchange, "combine", "exchange: sum"),
]
_RESIDUAL = ("attention_input", "add_attention", "ffn_input", "add_ffn", "output")
_PARTS += [
    (owner, name, "residual, norm")
    for owner in (BlockResidual, PlainResidual)
    for name in _RESIDUAL
]


class Parts:
    """Seconds of both clocks, and calls, by part. One thread only."""

    def __init__(self) -> None:
        self.wall: dict[str, float] = defaultdict(float)
        self.cpu: dict[str, float] = defaultdict(float)
        self.calls: dict[str, int] = defaultdict(int)
        self._nested = [(0.0, 0.0)]

    def wrap(self, function: Callable[..., Any], part: str) -> Callable[..., Any]:
        nested = self._nested

        @functools.wraps(function)
        def timed(*args: Any, **kwargs: Any) -> Any:
            nested.append((0.0, 0.0))
            wall, cpu = perf_counter(), thread_time()
            try:
                return function(*args, **kwargs)
            finally:
                wall, cpu = perf_counter() - wall, thread_time() - cpu
                inner_wall, inner_cpu = nested.pop()
                self.wall[part] += wall - inner_wall
                self.cpu[part] += cpu - inner_cpu
                self.calls[part] += 1
                outer_wall, outer_cpu = nested[-1]
                nested[-1] = outer_wall + wall, outer_cpu + cpu

        return timed

    def watch_head(self, model: Model) -> None:
        """The head is an attribute of each model, not a method of its class."""
        model.head = self.wrap(model.head, "head")  # type: ignore[assignment]

    def clear(self) -> None:
        self.wall.clear()
        self.cpu.clear()
        self.calls.clear()


@contextmanager
def timed_parts() -> Iterator[Parts]:
    """Wraps the parts of every engine while open."""
    parts = Parts()
    with ExitStack() as stack:
        for owner, name, part in _PARTS:
            timed = parts.wrap(getattr(owner, name), part)
            stack.enter_context(mock.patch.object(owner, name, timed))
        build = parts.wrap(engine_module.build_step, "engine: plan")
        stack.enter_context(mock.patch.object(engine_module, "build_step", build))
        yield parts
