"""A forward pass on another device than the host's: nothing lies in the wrong memory, nothing is
read back, and all that travels is one array of indices."""

from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any, TypeVar

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from expertmesh.actors.model.batch import PAGE_TOKENS, Batch, Span
from expertmesh.actors.model.checkpoint import Checkpoint
from expertmesh.actors.model.config import load_config
from expertmesh.actors.model.forward import EagerRunner
from expertmesh.actors.model.graphs import DECODE_OPERATORS, GraphRunner
from expertmesh.actors.model.model import Model
from expertmesh.kernels.registry import OPERATORS, Kernels
from tests.support.checkpoints import write_checkpoint
from tests.support.fake_device import META, MetaUploads, one_device

Result = TypeVar("Result")


def device_kernels() -> Kernels:
    """Triton's where there is one, as on a GPU."""
    functions = {}
    for name, operator in OPERATORS.items():
        backend = "torch_ops" if operator.without_triton else "triton_ops"
        home = import_module(f"expertmesh.kernels.{operator.home}.{backend}")
        functions[name] = getattr(home, name)
    functions["mla_prefill"] = unwatched(functions["mla_prefill"])
    return Kernels(backend="triton", **functions)


def unwatched(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Outside of `one_device`, where torch cannot make its causal mask, a subclass of Tensor."""

    def call(*args: Any) -> Tensor:
        with _disable_current_modes():
            return function(*args)

    return call


class Elsewhere:
    """An exchange that answers with the shape of an answer."""

    def __init__(self) -> None:
        self.layers: list[int] = []

    def begin_step(self, rows: int, micros: int = 1) -> None:
        pass

    def dispatch(
        self, layer: int, z_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor, micro: int = 0
    ) -> Tensor:
        assert z_TD.device == ids_TK.device == weights_TK.device == META
        self.layers.append(layer)
        return torch.empty(z_TD.shape, dtype=torch.float32, device=META)

    def combine(self, pending: Tensor) -> Tensor:
        return pending

    def end_step(self) -> None:
        pass


@pytest.fixture(scope="module", params=["kimi_k3", "kimi_linear"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Model:
    folder: Path = tmp_path_factory.mktemp(request.param)
    write_checkpoint(folder, family=request.param, num_experts=7)
    config = load_config(folder)
    return Model(
        config, device_kernels(), Checkpoint.open(folder, config),
        dtype=torch.bfloat16, device=META, uploads=MetaUploads(),
    )  # fmt: skip


def batch_of(decode: list[int], prompts: list[tuple[int, int]] = []) -> Batch:  # noqa: B006
    """decode: positions. prompts: (position, length)."""
    spans: list[Span] = []
    row = 0
    works = [(at, 1, True) for at in decode] + [(at, length, False) for at, length in prompts]
    for slot, (at, length, is_decode) in enumerate(works):
        pages = list(range(-(-(at + length) // PAGE_TOKENS)))
        spans.append(Span(slot, row, length, at, pages, is_decode))
        row += length
    return Batch(torch.zeros(row, dtype=torch.int64), spans, torch.arange(len(spans)))


def step(model: Model, batch: Batch, **options: Any) -> tuple[Tensor, list[str]]:
    """Logits, and the kernels that were launched."""
    state = model.new_state(8, 8)
    exchange = Elsewhere()
    with one_device(moving=bool(batch.prefill_spans)) as (_, launches):
        logits = model.forward(batch, state, exchange, **options)
    assert exchange.layers[-1] == model.config.moe_layers[-1]
    assert logits.device == META and logits.dtype == torch.float32
    assert logits.shape == (len(batch.logit_rows_R), model.config.vocab_size)
    return logits, [launch.name for launch in launches]


@pytest.mark.parametrize(
    ("decode", "prompts"),
    [([0], []), ([5, 63, 64, 130], []), ([], [(0, 70)]), ([], [(64, 5), (0, 1)]),
     ([9, 70], [(0, 64), (3, 66)])],
)  # fmt: skip
def test_a_pass_stays_on_its_device(
    model: Model, decode: list[int], prompts: list[tuple[int, int]]
) -> None:
    model.runner = EagerRunner(model, model.uploads)
    assert isinstance(model.uploads, MetaUploads)
    model.uploads.sent.clear()
    _, launched = step(model, batch_of(decode, prompts))
    assert len(model.uploads.sent) == 1
    kda = len(model.config.kda_layers)
    assert launched.count("kda_decode_kernel") == (kda if decode else 0)


class Shapes:
    """Records nothing: the pieces run once, on tensors without data."""

    def __init__(self) -> None:
        self.pieces: list[int] = []  # launches of each
        self.launches: list[Any] | None = None

    def warm(self, run: Callable[[], Any]) -> None:
        run()

    def record(self, micro: int, run: Callable[[], Result]) -> tuple[Callable[[], None], Result]:
        with one_device() as (mode, launches):
            made = run()
        self.pieces.append(mode.operators + len(launches))
        return lambda: None, made


def test_the_pieces_of_a_bucket_are_recorded_without_the_host(model: Model) -> None:
    """What would stop a capture on a GPU stops this: a read, a copy from or to the host."""
    recorder = Shapes()
    model.runner = runner = GraphRunner(model, EagerRunner(model, model.uploads), recorder)
    for decode in ([5, 63, 0], [64], [200, 3, 64]):
        logits, _ = step(model, batch_of(decode))
        assert logits.shape[0] == len(decode)
    assert [(bucket.rows, bucket.pages) for bucket in runner.buckets] == [(4, 8)]
    assert min(recorder.pieces) > 0


def test_two_micro_batches(model: Model) -> None:
    model.runner = EagerRunner(model, model.uploads)
    step(model, batch_of([5, 63, 64, 130]), ping_pong=True)


@pytest.mark.parametrize(
    "wrong",
    [
        lambda there, here: there + here,
        lambda there, here: there.copy_(here),
        lambda there, here: here.to(META),
        lambda there, here: there[torch.tensor([0, 1])],
        lambda there, here: there[[0, 1]],
        lambda there, here: torch.tensor([1, 2], device=META),
        lambda there, here: there.cpu(),
        lambda there, here: there.tolist(),
        lambda there, here: bool((there > 0).any()),
        lambda there, here: there[there > 0],
    ],
)
def test_what_the_host_must_not_do_is_seen(wrong: Callable[[Tensor, Tensor], Any]) -> None:
    with one_device() as (mode, _):
        torch.empty(4, 3, device=META).mul_(torch.tensor(2.0))
        assert mode.operators == 3, "a number may meet a tensor of the device"
        with pytest.raises((AssertionError, RuntimeError, NotImplementedError)):
            wrong(torch.empty(4, 3, device=META), torch.ones(4, 3))


def test_decode_operators_are_those_of_the_model() -> None:
    """Whether graphs can be recorded is asked of these."""
    asked = set(DECODE_OPERATORS)
    assert asked <= set(OPERATORS)
    free = {"pack_linear", "mla_plan", "mla_prefill", "kda_prefill"}
    served = {"experts_partial_sum", "mxfp4_decode", "mxfp4_encode", "fp8_encode", "fp8_decode"}
    sampled = {"sample", "log_probs", "counter_uniform"}
    assert asked | free | served | sampled == set(OPERATORS)
