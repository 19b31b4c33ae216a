"""Decode passes as recorded graphs: what lies between two exchanges is one launch.

A graph repeats recorded work on the same memory, so everything it reads must lie still and keep
its shape. Decode batches are padded to a *bucket*: a power of two of rows, a power of eight of
pages for the longest row. A bucket is recorded when it first comes up, one graph for each piece of
its pass; each step then copies its indices and the experts' sums into the bucket's memory and
replays. Prompts, and batches outside all buckets, are computed call by call.

What is recorded are addresses of weights, state and own memory: a new epoch or routing changes
none of them, another ModelState does and starts afresh.
"""

import gc
import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeVar

import torch
from torch import Tensor

from expertmesh.actors.model.batch import Batch, Words
from expertmesh.actors.model.forward import EagerRunner, Forward, Pass, Runner, Sending
from expertmesh.actors.state.model_state import ModelState
from expertmesh.kernels.registry import OPERATORS, resolve

if TYPE_CHECKING:
    from expertmesh.actors.model.model import Model

_log = logging.getLogger(__name__)

Choice = Literal["auto", "on", "off"]
Result = TypeVar("Result")
Replay = Callable[[], None]

FEWEST_ROWS = 4
MOST_ROWS = 256
# Coarse, for a new bucket is recorded in the middle of serving, while wide tables cost little: the
# attention over a context splits it into more and more tokens, and leaves out what is not there.
FEWEST_PAGES, PAGES_FACTOR = 8, 8
MOST_PAGES = 1 << 15  # two million tokens

# What a decode pass calls. Each must run on a GPU without asking the host anything.
DECODE_OPERATORS = (
    "rms_norm", "gated_rms_norm", "attn_res_mix", "attn_res_mix_norm",
    "kda_decode", "mla_decode", "output_gate", "route", "glu",
)  # fmt: skip


class GraphsUnavailable(ValueError):
    """Graphs were asked for by name and cannot be recorded here."""


class Recorder(Protocol):
    """Records work on a device. One of them at a time records or replays."""

    def warm(self, run: Callable[[], Any]) -> None:
        """Runs it once for real, so that kernels are compiled and libraries initialised."""
        ...

    def record(self, micro: int, run: Callable[[], Result]) -> tuple[Replay, Result]:
        """What repeats all that `run` launches, and its result, which each replay writes anew.

        Memory is shared by the graphs of one micro-batch, which never run at the same time.
        """
        ...


class CudaRecorder:
    """CUDA graphs. Never run where this was written: there is no GPU."""

    def __init__(self, device: torch.device) -> None:
        self._stream: Any = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._device = device
        self._pools: dict[int, Any] = {}

    def warm(self, run: Callable[[], Any]) -> None:
        gc.collect()  # what dies while a graph is recorded might free memory, which is an error
        computing = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(computing)
        with torch.cuda.stream(self._stream):
            run()
        computing.wait_stream(self._stream)

    def record(self, micro: int, run: Callable[[], Result]) -> tuple[Replay, Result]:
        if micro not in self._pools:
            self._pools[micro] = torch.cuda.graph_pool_handle()
        graph = torch.cuda.CUDAGraph()
        # Of this thread alone: others (watchdogs of NCCL, readers of counters) go on meanwhile.
        with torch.cuda.stream(self._stream):
            graph.capture_begin(self._pools[micro], capture_error_mode="thread_local")
            try:
                result = run()
            finally:
                graph.capture_end()
        return graph.replay, result


@dataclass(frozen=True, slots=True)
class Bucket:
    """micro: passes of two micro-batches are under way at once and share no memory."""

    rows: int
    pages: int
    micro: int


def bucket_of(batch: Batch, micro: int) -> Bucket | None:
    """None for a batch that is not recorded."""
    if not batch.is_decode or batch.rows > MOST_ROWS or batch.most_pages > MOST_PAGES:
        return None
    if batch.has_context:  # which pages are read is found out layer by layer
        return None
    rows, pages = FEWEST_ROWS, FEWEST_PAGES
    while rows < batch.rows:
        rows *= 2
    while pages < batch.most_pages:
        pages *= PAGES_FACTOR
    return Bucket(rows, pages, micro)


class GraphRunner:
    """Replays decode passes, hands everything else to `eager`."""

    def __init__(self, model: "Model", eager: EagerRunner, recorder: Recorder) -> None:
        self._model, self._eager, self._recorder = model, eager, recorder
        self._state: ModelState | None = None
        self._recorded: dict[Bucket, Recorded] = {}
        self._failed = False

    @property
    def buckets(self) -> list[Bucket]:
        """Recorded so far."""
        return list(self._recorded)

    def begin(self, batch: Batch, state: ModelState, micro: int) -> Pass:
        bucket = bucket_of(batch, micro)
        if bucket is None:
            return self._eager.begin(batch, state, micro)
        state.arrive()  # a graph cannot wait for single layers
        if state is not self._state:
            self._recorded.clear()
            self._state = state
        recorded = self._recorded.get(bucket) or self._record(bucket, state)
        if recorded is None:
            return self._eager.begin(batch, state, micro)
        words = batch.words(bucket.rows, bucket.rows, bucket.pages, state.spare_row)
        (sent,) = self._model.uploads.send(words.flat)
        return Replayed(recorded, words, sent, batch.rows)

    def _record(self, bucket: Bucket, state: ModelState) -> "Recorded | None":
        """None where it fails, and from then on: no request shall end for it. What is recorded
        already goes on being replayed."""
        if self._failed:
            return None
        _log.info("recording decode graphs for %d rows, %d pages", bucket.rows, bucket.pages)
        try:
            recorded = Recorded(self._model, state, bucket, self._recorder)
        except RuntimeError:  # no memory, or a call that cannot be recorded
            self._failed = True
            _log.exception("recording failed: other decode passes are computed call by call")
            return None
        self._recorded[bucket] = recorded
        return recorded


class Recorded:
    """The graphs of one bucket, and the memory they work on.

    B rows of the bucket. words: indices int64, as Words lays them out, the wanted rows being all.
    routed_BD: fp32, the experts' sums.
    """

    def __init__(
        self, model: "Model", state: ModelState, bucket: Bucket, recorder: Recorder
    ) -> None:
        rows = bucket.rows
        padding = Batch(torch.empty(0, dtype=torch.int64), [], torch.arange(rows))
        # Nothing but padding: what is run to warm up reads and writes nobody's state.
        words = padding.words(rows, rows, bucket.pages, state.spare_row)
        (self.words,) = model.uploads.keep(words.flat)
        self.routed_BD = torch.zeros(
            rows, model.config.latent_size, dtype=torch.float32, device=model.device
        )
        inputs = words.inputs(self.words)
        recorder.warm(lambda: self._run(Forward(model, inputs, state)))
        forward = Forward(model, inputs, state)
        self.made: list[tuple[Replay, Sending | Tensor]] = []
        self.shares: list[Replay | None] = []
        routed_BD: Tensor | None = None
        while not self.made or isinstance(self.made[-1][1], Sending):
            self.made.append(recorder.record(bucket.micro, partial(forward.advance, routed_BD)))
            if isinstance(self.made[-1][1], Sending):
                shared = recorder.record(bucket.micro, forward.share) if forward.shares else None
                self.shares.append(None if shared is None else shared[0])
            routed_BD = self.routed_BD

    def _run(self, forward: Forward) -> None:
        made = forward.advance(None)
        while isinstance(made, Sending):
            forward.share()
            made = forward.advance(self.routed_BD)


class Replayed:
    """One pass over the graphs of a bucket. rows: those that are no padding, the first ones."""

    def __init__(self, recorded: Recorded, words: Words, sent: Tensor, rows: int) -> None:
        self._recorded, self._rows, self._piece = recorded, rows, 0
        recorded.words[: words.fixed].copy_(sent[: words.fixed])
        self._wanted_R = sent[words.fixed :]

    def advance(self, routed_TD: Tensor | None) -> Sending | Tensor:
        recorded, rows = self._recorded, self._rows
        if routed_TD is not None:
            recorded.routed_BD[:rows].copy_(routed_TD)
        replay, made = recorded.made[self._piece]
        replay()
        self._piece += 1
        if isinstance(made, Sending):
            return Sending(made.layer, *(part[:rows] for part in made[1:]))
        wanted_R = self._wanted_R
        # Ascending and distinct: as many as there are rows are all rows.
        return made[:rows] if len(wanted_R) == rows else made.index_select(0, wanted_R)

    def share(self) -> None:
        replay = self._recorded.shares[self._piece - 1]
        if replay is not None:
            replay()


def runner_for(model: "Model", choice: Choice) -> Runner:
    """auto: graphs where they can be recorded. Raises GraphsUnavailable for "on" where not."""
    eager = EagerRunner(model, model.uploads)
    if not wanted(choice, model.kernels.backend, model.device.type):
        return eager
    return GraphRunner(model, eager, CudaRecorder(model.device))


def wanted(choice: Choice, kernels: str, device_type: str) -> bool:
    """Whether decode passes are recorded with these kernels (as `resolve` takes them) on a device
    of this type. Raises GraphsUnavailable for "on" where they cannot be."""
    if choice == "off":
        return False
    reason = why_no_graphs(kernels, device_type)
    if reason and choice == "on":
        raise GraphsUnavailable(f"decode graphs cannot be recorded: {reason}")
    return not reason


def why_no_graphs(kernels: str, device_type: str) -> str:
    """Empty where they can be recorded. Raises KernelsUnavailable."""
    if device_type != "cuda":
        return f"the device is {device_type}, not a CUDA GPU"
    served = resolve(kernels, device_type)
    slow = [
        name
        for name in DECODE_OPERATORS
        if served[name] != "triton" and not OPERATORS[name].without_triton
    ]
    return f"{', '.join(slow)} would ask the host: only Triton kernels do not" if slow else ""
