"""The whole model by Triton's kernels, in the interpreter, against the golden files.

A token costs about a second there: the prefill is the prompt's beginning, and the decodes go on
from a state that torch's kernels made.
"""

import json
from itertools import pairwise

import pytest
from safetensors.torch import load_file

from expertmesh.actors.model.model import RoutingTrace
from expertmesh.kernels.registry import OPERATORS
from tests.support import triton_speed
from tests.support.golden import GOLDEN
from tests.support.runner import Runner

triton_speed.install()

PREFILLED = 6
MEDIAN = 1e-4  # difference to the golden logits; both bounds as for torch's kernels


@pytest.mark.parametrize(
    ("name", "most", "decoded"), [("kimi_k3-tiny", 2e-2, 1), ("kimi_linear-tiny", 1e-4, 2)]
)
def test_golden(name: str, most: float, decoded: int) -> None:
    folder = GOLDEN / name
    expected = json.loads((folder / "expected.json").read_text())
    ids, greedy = expected["prompt_ids"], expected["greedy_ids"]
    runner, trace = Runner(folder, slots=1, backend="triton"), RoutingTrace()
    for operator, about in OPERATORS.items():
        module = getattr(runner.kernels, operator).__module__
        assert ("triton" in module) == (not about.without_triton), operator

    logits_TV = runner.step([(0, ids[:PREFILLED], False)], trace)
    golden_TV = load_file(folder / "expected-logits.safetensors")["logits"][:PREFILLED]
    gap = (logits_TV - golden_TV).abs()
    assert gap.max() <= most and gap.median() <= MEDIAN
    for layer, rows in expected["routed_experts"].items():
        assert trace.layers[int(layer)].tolist() == rows[:PREFILLED]

    torchs = Runner(folder, slots=1, backend="torch")
    last_V = torchs.prefill(0, ids)[-1]
    for mine, other in zip(runner.state.tensors(), torchs.state.tensors(), strict=True):
        mine.copy_(other)
    runner.length[0] = torchs.length[0]
    assert int(last_V.argmax()) == greedy[0]
    for token, following in pairwise(greedy[: decoded + 1]):
        decoded_V = runner.step([(0, [token], True)])[0]
        assert int(decoded_V.argmax()) == following
        assert (decoded_V - torchs.step([(0, [token], True)])[0]).abs().max() <= most
