"""`expertmesh bench residual`: what is counted, what is compared, what is printed."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from expertmesh.actors.model.config import load_config
from expertmesh.actors.model.residual import AttnResWeights, BlockResidual
from expertmesh.deploy.bench import launches, residual
from expertmesh.deploy.bench.counting import Work, count
from expertmesh.deploy.bench.launches import count_launches
from expertmesh.deploy.bench.pairs import Pair, Spread, alternate
from expertmesh.deploy.bench.residual import K3, Shape, compare
from expertmesh.deploy.cli import BUNDLED, app
from expertmesh.deploy.exit_codes import ExitCode
from expertmesh.kernels.registry import load_kernels
from tests.support.golden import GOLDEN


def test_sites_are_those_of_the_model() -> None:
    """Against the model's own residual object, which counts its sources."""
    config = load_config(GOLDEN / "kimi_k3-tiny")
    shape = Shape.of("tiny", config)
    assert shape is not None
    seen: list[int] = []
    weights = AttnResWeights(config, lambda name: torch.ones(1, config.hidden_size))

    def mix(sources: torch.Tensor, *rest: object) -> torch.Tensor:
        seen.append(sources.shape[0])
        return sources[0].clone()

    kernels = replace(load_kernels(), attn_res_mix=mix, attn_res_mix_norm=mix)
    walked = BlockResidual(torch.zeros(1, config.hidden_size), weights, kernels)
    ones = torch.ones(config.hidden_size)
    for layer in range(config.num_layers):
        walked.attention_input(layer, ones, 1e-5)
        walked.add_attention(torch.zeros(1, config.hidden_size))
        walked.ffn_input(layer, ones, 1e-5)
        walked.add_ffn(torch.zeros(1, config.hidden_size))
    walked.output()
    assert [n for n in shape.sources() if n > 1] == seen
    assert len(shape.sources()) == 2 * config.num_layers + 1


def test_k3_has_187_sites_of_at_most_nine_sources() -> None:
    assert len(K3.sources()) == 187 and max(K3.sources()) == K3.sources()[-1] == 9
    published = load_config(GOLDEN / "kimi_k3-config.json")
    assert Shape.of(K3.name, published) == K3
    assert Shape.of("48B", load_config(GOLDEN / "kimi_linear-tiny")) is None


def test_counting_sees_through_views_and_composites() -> None:
    a, b = torch.ones(8, 16), torch.ones(16)
    product, vector, scalars = 8 * 16 * 4, 16 * 4, 8 * 4

    assert count(lambda: a.t().view(2, 8, 8)[0].unsqueeze(0)) == Work(0, 0)
    assert count(lambda: a * b) == Work(1, 2 * product + vector)
    # A product that is written and read again, then a sum.
    assert count(lambda: torch.linalg.vecdot(a, b)) == Work(2, 3 * product + vector + scalars)
    assert count(lambda: a.mv(b)) == Work(1, product + vector + scalars)
    assert count(lambda: a.mul_(2.0)) == Work(1, 2 * product)


def test_the_fused_operator_launches_and_moves_less_for_the_same_result() -> None:
    result = compare(Shape("small", 256, 6, 2), tokens=4, rounds=1)
    assert result.equal and result.difference > 0  # equal to rounding, and truly another way
    assert result.fused.operators < result.unfused.operators
    assert result.fused.bytes_moved < 0.85 * result.unfused.bytes_moved
    assert result.sites == 13 and result.most_sources == 4


def test_a_gpus_kernels_are_counted_without_one() -> None:
    """Against the memory that the recorded launches are given."""
    sources, tokens, width = [1, 2, 3, 3], 5, 48
    counted = count_launches(sources, tokens, width)
    assert (counted.fused.kernels, counted.unfused.kernels) == (4, 7)  # a mix of one is no work
    rows, vector = 2 * tokens * width, 2 * width
    score, norm = 2 * vector, vector
    fused = [(n + 1) * rows + score + norm for n in sources]
    unfused = [(n > 1) * ((n + 1) * rows + score) + 2 * rows + norm for n in sources]
    assert counted.fused.bytes_moved == sum(fused)
    assert counted.unfused.bytes_moved == sum(unfused)
    assert counted.unfused.floor_us == pytest.approx(sum(unfused) / 4.8e6)


def test_both_ways_are_timed_in_turns() -> None:
    order: list[str] = []
    clocks = alternate(lambda: order.append("a"), lambda: order.append("b"), 3, least_s=0)
    assert order == ["a", "b", "a", "b", "b", "a", "a", "b"] and clocks.rounds == 3
    assert Pair.of([1.0, 2.0, 3.0], [2.0, 2.0, 2.0]).ratio == Spread(1.0, 0.75, 1.25)
    assert Spread.of([3.0]) == Spread(3.0, 3.0, 3.0)
    assert Spread.of([1.0, 2.0, 3.0, 4.0, 5.0]) == Spread(3.0, 2.0, 4.0)


def run(*arguments: str) -> tuple[int, str]:
    done = CliRunner().invoke(app, ["bench", "residual", "--no-k3", "--rounds", "1", *arguments])
    assert done.exception is None or isinstance(done.exception, SystemExit), done.exception
    return done.exit_code, done.stdout + done.stderr


def test_the_command() -> None:
    code, text = run("--tokens", "2", "--tokens", "3", "--json")
    report = json.loads(text)
    assert code == 0 and [one["tokens"] for one in report["results"]] == [2, 3]
    assert all(one["shape"]["name"] == BUNDLED.name for one in report["results"])
    assert report["conditions"]["threads"] == 1
    assert all(one["triton"]["fused"]["kernels"] == one["sites"] for one in report["results"])
    code, text = run("--tokens", "2")
    assert code == 0 and "equal in float32" in text and "unfused" in text
    assert "kernels launched" in text and "17 / 33" in text


def test_without_triton_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launches, "find_spec", lambda name: None)
    code, text = run("--tokens", "2")
    assert code == 0 and "not counted: triton is not installed" in text
    code, text = run("--tokens", "2", "--json")
    report = json.loads(text)
    assert report["triton"] == "triton is not installed"
    assert report["results"][0]["triton"] is None


def test_results_that_differ_are_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = residual.attn_res_mix_norm
    monkeypatch.setattr(residual, "attn_res_mix_norm", lambda *args: wrong(*args) + 1e-3)
    code, text = run("--tokens", "2")
    assert code == ExitCode.FAILED and "disagree" in text


def test_wrong_usage(tmp_path: Path) -> None:
    code, text = run("--model", str(GOLDEN / "kimi_linear-tiny"))
    assert code == ExitCode.USAGE and "ordinary residuals" in text
    assert run("--model", str(tmp_path / "nowhere"))[0] == ExitCode.NO_MODEL
    assert run("--tokens", "0")[0] == ExitCode.USAGE
