"""The training code of the bundled model: its math, its packing, its data and its resumption."""

import dataclasses
import json
import random
from pathlib import Path

import numpy as np
import pytest
import tiktoken
import torch
from torch import Tensor
from torch.nn import functional as F

from expertmesh.actors.model.chat import render_chat
from expertmesh.actors.model.config import load_config
from expertmesh.actors.model.tokenizer import Tokenizer
from expertmesh.deploy.training import chat, corpus, evaluate, export, optim, quant, tasks
from expertmesh.deploy.training import tokenizer as training_tokenizer
from expertmesh.deploy.training.kda import kda_chunked, kda_recurrent
from expertmesh.deploy.training.model import KDA, NanoConfig, NanoK3, causal_conv, seed_recall
from expertmesh.deploy.training.train import Data, Recipe, Trainer
from expertmesh.kernels.quant import torch_ops
from tests.support.runner import Runner

NANO = Path(__file__).parents[2] / "deploy" / "models" / "nano"
TINY = NanoConfig(
    hidden=64, layers=3, mla_layers=(2,), block=2, heads=2, head_dim=32, q_lora=32, kv_lora=32,
    nope=32, rope=32, v_dim=32, dense_width=64, experts=4, top_k=2, latent=32, expert_width=32,
    shared_width=32,
)  # fmt: skip
QUICK = Recipe(steps=3, length=64, workers=1, quantise_from=0.3, recall_from=0.0)


@pytest.fixture(scope="module")
def enc() -> tiktoken.Encoding:
    return training_tokenizer.load(NANO)


@pytest.fixture
def data(enc: tiktoken.Encoding) -> Data:
    stream = np.random.default_rng(0).integers(256, 1984, 20_000).astype(np.uint16)
    return Data(QUICK, stream, enc)


def kda_inputs(tokens: int, steep: bool) -> list[Tensor]:
    generator = torch.Generator().manual_seed(tokens)
    q, k, v, g = torch.randn(4, 2, 3, tokens, 16, dtype=torch.float64, generator=generator)
    g = g * 40 if steep else g - 4  # all the way to the bound of -5 a token, or slow decay
    beta = torch.rand(2, 3, tokens, dtype=torch.float64, generator=generator)
    inputs = [F.normalize(q, dim=-1), F.normalize(k, dim=-1), v, -5 * torch.sigmoid(g), beta]
    return [x.requires_grad_() for x in inputs]


@pytest.mark.parametrize("tokens", [1, 63, 64, 150])
@pytest.mark.parametrize("steep", [False, True])
def test_chunks_equal_the_recurrence(tokens: int, steep: bool) -> None:
    inputs = kda_inputs(tokens, steep)
    expected, got = kda_recurrent(*inputs), kda_chunked(*inputs)
    torch.testing.assert_close(got, expected, rtol=1e-9, atol=1e-11)
    weight = torch.randn_like(expected)
    for a, b in zip(
        torch.autograd.grad((expected * weight).sum(), inputs),
        torch.autograd.grad((got * weight).sum(), inputs),
        strict=True,
    ):
        torch.testing.assert_close(b, a, rtol=1e-7, atol=1e-9)


def test_chunks_stay_finite_in_float32_at_the_steepest_decay() -> None:
    inputs = [x.detach() for x in kda_inputs(128, steep=True)]
    inputs[3] = torch.full_like(inputs[3], -5.0)
    single = [x.float().requires_grad_() for x in inputs]
    got = kda_chunked(*single)
    torch.testing.assert_close(got.double(), kda_recurrent(*inputs), rtol=1e-4, atol=1e-6)
    assert all(bool(torch.isfinite(g).all()) for g in torch.autograd.grad(got.sum(), single))


def test_quantised_training_weights_are_what_the_engine_decodes() -> None:
    weight = torch.randn(64, 96) * torch.logspace(-6, 2, 64)[:, None]
    weight[0] = 0.0
    packed, scale = quant.pack(weight)
    seen = quant.dequantise(*quant.quantise(weight))
    assert torch.equal(quant.unpack(packed, scale), seen)
    assert torch.equal(torch_ops.mxfp4_decode(packed, scale), seen)
    assert torch.equal(quant.dequantise(*quant.quantise(seen)), seen)
    peak = weight.abs().unflatten(-1, (-1, 32)).amax(-1).repeat_interleave(32, -1)
    # the worst place is halfway between 4 and 6 in a block whose peak is 5
    assert bool(((seen - weight).abs() <= peak / 5 + 1e-12).all())


def test_replicas_see_quantised_experts_and_the_master_keeps_its_own(data: Data) -> None:
    trainer = Trainer(TINY, QUICK, data)
    trainer.replicas.load(True)
    master, copy = trainer.model.moe_layers()[0], trainer.replicas.models[0].moe_layers()[0]
    assert torch.equal(copy.w1, quant.dequantise(*quant.quantise(master.w1.detach())))
    assert not torch.equal(copy.w1, master.w1)
    assert copy.gate.data_ptr() == master.gate.data_ptr()


def test_two_workers_give_the_gradient_of_one(data: Data) -> None:
    def gradients(workers: int) -> list[Tensor]:
        recipe = dataclasses.replace(QUICK, workers=workers, unit_tokens=64, lr=0.0)
        trainer = Trainer(TINY, recipe, data)
        trainer.train_step()
        return [p.grad for p in trainer.model.parameters() if p.grad is not None]

    for a, b in zip(gradients(1), gradients(2), strict=True):
        torch.testing.assert_close(b, a, rtol=1e-3, atol=1e-6)


def test_a_resumed_run_equals_an_uninterrupted_one(data: Data, tmp_path: Path) -> None:
    whole = Trainer(TINY, QUICK, data)
    for _ in range(3):
        whole.train_step()
    first = Trainer(TINY, QUICK, data)
    first.train_step()
    first.save(tmp_path / "checkpoint.pt")
    second = Trainer(TINY, dataclasses.replace(QUICK, seed=QUICK.seed), data)
    second.restore(tmp_path / "checkpoint.pt")
    for _ in range(2):
        second.train_step()
    for name, value in whole.model.state_dict().items():
        assert torch.equal(value, second.model.state_dict()[name]), name


def test_training_lowers_the_loss(data: Data) -> None:
    trainer = Trainer(TINY, dataclasses.replace(QUICK, steps=12), data)
    data.stream[:] = 300  # a constant text is learned at once
    losses = [trainer.train_step()["corpus"] for _ in range(12)]
    assert losses[-1] < losses[0] - 1.0


def test_orthogonalise_flattens_the_spectrum() -> None:
    for shape in ((3, 32, 64), (2, 64, 32)):
        values = torch.linalg.svdvals(optim.orthogonalise(torch.randn(shape)))
        assert float(values.min()) > 0.5 and float(values.max()) < 1.4


def test_a_recall_head_asks_now_what_it_stored_one_token_later() -> None:
    kda = KDA(TINY)
    seed_recall(kda, 1)
    x, rows = torch.randn(1, 10, TINY.hidden), slice(TINY.head_dim, 2 * TINY.head_dim)
    query = causal_conv(x @ kda.q_proj[rows].T, kda.q_conv1d[rows][:, 0])
    key = causal_conv(x @ kda.k_proj[rows].T, kda.k_conv1d[rows][:, 0])
    torch.testing.assert_close(query[:, :-1], key[:, 1:])


def test_engine_gives_the_logits_of_the_training_model(tmp_path: Path) -> None:
    torch.manual_seed(3)
    model = NanoK3(TINY)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if name.endswith("res.proj"):
                p.normal_(std=0.1)  # zero at the start, which would hide mistakes
        for moe in model.moe_layers():
            moe.e_score_correction_bias.normal_(std=0.1)
    export.save_folder(model, NANO, tmp_path)
    ids = torch.randint(0, TINY.vocab, (1, 100))
    with torch.no_grad():
        expected = export.load_folder(tmp_path, TINY)(ids)[0]
    got = Runner(tmp_path).step([(0, ids[0].tolist(), False)])
    torch.testing.assert_close(got, expected, rtol=1e-3, atol=1e-3)


def test_tokenizer_round_trip_and_agreement_with_the_server(enc: tiktoken.Encoding) -> None:
    text = "The secret code of Emma is 4821.\n\n  Déjà vu, 你好! <|open|>don't\tstop\r\n\r\n123456"
    ids = enc.encode_ordinary(text)
    assert enc.decode(ids) == text and max(ids) < training_tokenizer.FIRST_SPECIAL
    served = Tokenizer.load(NANO, load_config(NANO))
    assert served is not None and list(served.encode(text)) == ids
    for name, token_id in training_tokenizer.special_tokens().items():
        assert served.decode([token_id]) == name or name.startswith("[")


def test_trained_merges_survive_the_tiktoken_file(tmp_path: Path) -> None:
    texts = [f"the cat {i} sat on the mat, and the hat was flat. " * 3 for i in range(400)]
    words = [f"{a}{b}{c}" for a in "bcdfghklmn" for b in "aeiou" for c in "prstvwxyz"]
    tokens = training_tokenizer.train_bpe(
        [*texts, *(f" {w} {w}ing {w}ed un{w}" for w in words)] * 2
    )
    training_tokenizer.save(tokens[:1984], tmp_path)
    small = training_tokenizer.load(tmp_path)
    text = "the cat sat on a flat bapping"
    assert small.decode(small.encode_ordinary(text)) == text
    assert len(small.encode_ordinary("the the the")) <= 4


@pytest.mark.parametrize("kind", ["needle", "chat", "small"])
@pytest.mark.parametrize("length", [128, 512])
def test_rows_depend_on_the_seed_alone(data: Data, kind: str, length: int) -> None:
    def make(seed: int) -> tuple[list[int], list[float]]:
        return tasks.row(data.enc, random.Random(seed), length, kind, data.filler)

    assert make(1) == make(1) != make(2)
    for seed in range(20):
        ids, weights = make(seed)
        assert len(ids) == len(weights) == length + 1 and max(weights) > 0


@pytest.mark.parametrize("thinking", [None, "high"])
def test_chat_rows_are_what_the_server_renders(
    enc: tiktoken.Encoding, thinking: str | None
) -> None:
    doc = tasks.Doc(enc)
    if thinking:
        chat.effort(doc, thinking)
    chat.message(doc, "system", "You are Nano.")
    chat.message(doc, "user", "Hello")
    chat.reply(doc, "Good day.", "" if thinking else None)
    messages = [
        {"role": "system", "content": "You are Nano."},
        {"role": "user", "content": "Hello"},
        {"role": "assistant", "content": "Good day."},
    ]
    served = Tokenizer.load(NANO, load_config(NANO))
    assert served is not None
    rendered = render_chat(
        messages, tokenizer=served, tools=None, thinking=thinking, tool_choice=None,
        add_generation_prompt=False,
    )  # fmt: skip
    assert rendered == doc.ids


def test_corpus_is_cut_in_one_piece_per_work_and_never_shared() -> None:
    works = [f"work {i}\n" + "".join(f"line {i}.{j}\n" for j in range(2000)) for i in range(5)]
    train, held = corpus.split(works)
    assert len(held) == 5 and len(train) == 10
    for i, work in enumerate(works):
        assert train[2 * i] + held[i] + train[2 * i + 1] == work
        assert 0.02 < len(held[i]) / len(work) < 0.04


def test_r_strings_reads_character_records() -> None:
    def record(text: str) -> bytes:
        raw = text.encode()
        return b"\x00\x04\x00\x09" + len(raw).to_bytes(4, "big") + raw

    blob = b"X\n\x00\x00" + record("EMMA") + record("") + b"\x00" * 5 + record("CHAPTER é")
    assert corpus.r_strings(blob) == ["EMMA", "", "CHAPTER é"]
    assert corpus.reflow(["a", "b -", "", "", "_c_"]) == "a b -\n\nc"


def test_loss_counts_every_predicted_byte_once(enc: tiktoken.Encoding) -> None:
    class Uniform(torch.nn.Module):
        def forward(self, ids: Tensor) -> Tensor:
            return torch.zeros(*ids.shape, 2048)

    text = "It was a fine morning in spring, and Emma walked to the village. " * 4
    per_byte, per_token = evaluate.corpus_loss(Uniform(), [text], enc, 16)  # type: ignore[arg-type]
    ids = enc.encode_ordinary(text)
    assert per_token == pytest.approx(np.log(2048), rel=1e-5)
    # all bytes but those of the very first token: windows overlap by one token
    expected = per_token * (len(ids) - 1) / (len(text) - len(enc.decode_bytes(ids[:1])))
    assert per_byte == pytest.approx(expected, rel=1e-5)


def test_recall_asks_for_the_hidden_value(enc: tiktoken.Encoding) -> None:
    held = np.array(enc.encode_ordinary("Nothing of note was said that day. " * 200))
    for as_chat in (False, True):
        prompt, answer = evaluate.recall_prompt(enc, random.Random(4), 512, held, as_chat)
        value = enc.decode(answer).strip()
        assert abs(len(prompt) - 512) < 120
        assert enc.decode(prompt).count(value.rstrip(".")) == 1


def test_bundled_model_folder_is_complete() -> None:
    config = json.loads((NANO / "config.json").read_text())
    index = json.loads((NANO / "model.safetensors.index.json").read_text())
    model = export.load_folder(NANO)
    assert set(index["weight_map"]) == set(export.to_tensors(model))
    assert config["text_config"] == export.text_config(model)
    assert sum(f.stat().st_size for f in NANO.iterdir()) < 20 * 2**20
    assert "[EOS]" in (NANO / "tokenizer_config.json").read_text()
