"""The codecs' frontier reads texts as the engine does, and measures what it says it measures."""

import math
import random
from pathlib import Path

import pytest
import torch

from expertmesh.actors.attention.engine import Engine
from expertmesh.actors.attention.settings import EngineSettings
from expertmesh.deploy.bench.codec_errors import errors
from expertmesh.deploy.bench.codec_estimates import SHIPPED, Estimate, Read, compared, shipped
from expertmesh.deploy.bench.codec_reader import CodecReader, Queries
from expertmesh.deploy.bench.codecs import (
    FACTS,
    Amount,
    frontier,
    k3_pages,
    recall_case,
    speeds,
)
from expertmesh.deploy.eval.cases import Maker
from expertmesh.deploy.eval.filler import Prose
from tests.support.engines import finish, request

NANO = Path(__file__).resolve().parents[2] / "deploy" / "models" / "nano"
TOKENS = 400


@pytest.fixture(scope="module")
def reader() -> CodecReader:
    return CodecReader(NANO, "float32", TOKENS + 64)


@pytest.fixture(scope="module")
def maker(reader: CodecReader) -> Maker:
    return Maker(reader.tokenizer, Prose())


def test_reads_and_asks_as_the_engine_does(reader: CodecReader, maker: Maker) -> None:
    case = recall_case(maker, random.Random(1), TOKENS)
    read = torch.cat(list(reader.log_probs(case.context, shipped("raw"))))
    verdicts = reader.ask(case)
    settings = EngineSettings(pages=64, slots=FACTS + 1)
    model, exchange = reader._model, reader._exchange
    engine = Engine(model, model.new_state(64, FACTS + 1), exchange, settings, reader.config.eos)
    engine.submit(request("text", list(case.context), 1, prompt_logprobs=0))
    for at, probe in enumerate(case.probes):
        begin, end = probe.spans[0]
        prompt = [*case.context, *probe.ids[:begin]]
        engine.submit(request(f"ask {at}", prompt, end - begin, logprobs=0))
    answers = finish(engine)
    told = answers["text"].prompt_logprobs
    assert told is not None
    wanted = read[:-1].gather(1, torch.tensor(case.context[1:])[:, None]).squeeze(1)
    assert wanted.tolist() == pytest.approx([one.logprob for one in told if one], abs=1e-4)
    for at, (probe, verdict) in enumerate(zip(case.probes, verdicts, strict=True)):
        answer = answers[f"ask {at}"]
        assert verdict.right == (answer.token_ids == list(probe.ids[slice(*probe.spans[0])]))
        if verdict.right:
            nats = -sum(one.logprob for one in answer.logprobs)
            assert verdict.nats == pytest.approx(nats, abs=1e-3)


def test_what_is_old_is_replaced_and_what_is_not_is_not(reader: CodecReader, maker: Maker) -> None:
    ids, _ = maker.haystack(random.Random(2), 330, [])
    seen: list[int] = []

    def zeros(latents: torch.Tensor) -> Read:
        seen.append(latents.shape[1])
        return Read(latents * 0, 0.0, None)

    exact, same, other = (
        torch.cat(list(reader.log_probs(ids, estimate)))
        for estimate in (shipped("raw"), shipped("lossless"), Estimate("zeros", zeros))
    )
    assert torch.equal(exact, same)
    assert torch.equal(exact[:128], other[:128]) and not torch.equal(exact[128:], other[128:])
    assert seen == [64] * 4  # five whole pages, the first stays
    assert not reader.latents[:, 64:320].any() and reader.latents[:, :64].any()
    assert reader.latents[:, 320:330].any()


def test_errors_are_those_of_the_formulas() -> None:
    generator = torch.Generator().manual_seed(3)
    exact = torch.randn(1, 200, 24, generator=generator)
    wrong = 0.01 * torch.randn(1, 200, 24, generator=generator)
    wrong[:, :8] = 0
    queries = torch.randn(5, 2, 24, generator=generator)
    w_v = torch.randn(2, 6, 16, generator=generator)
    found = errors([Queries(queries, w_v, 0.25)], exact, exact + wrong, 8)
    assert found.row_mse == pytest.approx(1e-4, rel=0.1)
    assert found.logit_rms == pytest.approx(0.25 * math.sqrt(24) * 0.01, rel=0.1)
    assert found.logit_predicted == pytest.approx(found.logit_rms, rel=0.1)
    weights = (0.25 * torch.einsum("nhc,tc->nht", queries, exact[0])).softmax(-1)
    right = torch.einsum("nht,tr,hvr->nhv", weights, exact[0, :, :16], w_v)
    weights = (0.25 * torch.einsum("nhc,tc->nht", queries, (exact + wrong)[0])).softmax(-1)
    read = torch.einsum("nht,tr,hvr->nhv", weights, (exact + wrong)[0, :, :16], w_v)
    relative = (read - right).norm(dim=-1) / right.norm(dim=-1)
    assert found.output_mean == pytest.approx(float(relative.mean()), rel=1e-4)
    assert found.output_mean < found.output_p99


@pytest.mark.parametrize("estimate", compared(), ids=lambda e: e.name)
def test_the_codecs_compared_with_are_what_their_names_say(estimate: Estimate) -> None:
    latents = torch.randn(2, 64, 128, generator=torch.Generator().manual_seed(4))
    read = estimate.of(latents)
    error = float((read.latents - latents).square().sum() / latents.square().sum())
    most = {"fp8_e4m3_rows": 1e-3, "centroid": 1.0}
    assert 0 < error < most.get(estimate.name, 3 * 4.0 ** -int(read.bits))


def test_rows_of_every_codec_and_their_speeds() -> None:
    heard: list[str] = []
    amount = Amount(tokens=192, windows=1, context=128, contexts=1)
    rows = frontier(NANO, Prose(), amount, ["float32"], heard.append, others=False)
    by_name = {row.codec: row for row in rows}
    assert [row.codec for row in rows] == list(SHIPPED)
    # The exact rows and what is compared with them tell of both texts, and every row of its end.
    assert heard[:2] == ["float32 exact rows: 1 of 2 texts", "float32 exact rows: 2 of 2 texts"]
    assert sum("of 2 texts" in line for line in heard) == 2 * len(rows)
    assert sum("nats per byte" in line for line in heard) == len(rows)
    for name in ("raw", "lossless"):
        row = by_name[name]
        assert row.errors.row_mse == row.nats_change == row.kl == row.answer_change == 0
        assert row.lost == row.gained == 0
    assert by_name["lossless"].ratio > 1.15
    assert 0 < by_name["int8"].errors.row_mse < by_name["int4"].errors.row_mse < 0.02
    assert 0 < by_name["int8"].kl < by_name["int4"].kl < 0.02
    assert all(row.exact_bits is not None and row.exact_bits < 32.2 for row in rows)
    assert {row.facts for row in rows} == {FACTS}
    pages = {"small": k3_pages()["k3 bfloat16"][:2]}
    measured = speeds(pages, seconds=0.01)
    assert [one.codec for one in measured] == list(SHIPPED)
    assert all(min(one.encode, one.decode, one.estimate) > 0 for one in measured)
