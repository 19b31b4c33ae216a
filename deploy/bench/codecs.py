"""How good and how fast the codecs of cached state are (kv-state 3.5): one row per codec and dtype.

Quality is that of the worst case: everything behind the first page and the step at hand is an
estimate, at every position, where a running request would keep a window of exact rows as well.
"""

import math
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from statistics import fmean
from time import perf_counter, thread_time

import msgspec
import torch
from torch import Tensor

from expertmesh.actors.model.batch import PAGE_TOKENS
from expertmesh.actors.model.loading import Dtype
from expertmesh.actors.state.codec.pack import pack, unpack_layer
from expertmesh.actors.state.codec.packed import Packed
from expertmesh.deploy.bench.codec_errors import Errors, errors
from expertmesh.deploy.bench.codec_estimates import SHIPPED, Estimate, compared, page, shipped
from expertmesh.deploy.bench.codec_reader import SINKS, CodecReader, Verdict
from expertmesh.deploy.eval.cases import Case, Maker
from expertmesh.deploy.eval.filler import Filler
from expertmesh.deploy.eval.needles import facts

FACTS = 8
K3_PAGE = (24, PAGE_TOKENS, 576)
RECALL_STEP = 4 * PAGE_TOKENS  # facts are read in larger steps, to have more of them


class Amount(msgspec.Struct, frozen=True, kw_only=True):
    """How much is read for a row: windows of `tokens` for nats, contexts of `context` for recall,
    with FACTS facts in each."""

    tokens: int = 2048
    windows: int = 8
    context: int = 1024
    contexts: int = 64


class Row(msgspec.Struct, kw_only=True):
    """bits: per value, as stored; exact_bits: with what is missing to the exact bytes, None where
    there is no way back. ratio: bits of the dtype over `bits`.

    nats_change: per byte, against exact latents, with the standard error over windows. kl: nats per
    token from what exact latents predict to what is predicted; it sees what nats do not. recall:
    share of facts given back; lost and gained: facts against exact latents; answer_change: nats of
    an answer, against exact latents. What the recurrent state alone can say shows in "centroid".
    """

    codec: str
    dtype: str
    shipped: bool
    bits: float
    ratio: float
    exact_bits: float | None
    errors: Errors
    nats_per_byte: float
    nats_change: float
    nats_error: float
    kl: float
    recall: float
    facts: int
    lost: int
    gained: int
    answer_change: float
    answer_error: float


class Speed(msgspec.Struct, kw_only=True):
    """GB/s of unpacked bytes on one thread, fastest of the repetitions. encode includes the proof
    that the bytes can be had back; decode is what an exact load takes, estimate the base alone."""

    codec: str
    what: str
    encode: float
    decode: float
    estimate: float
    ratio: float


def frontier(
    folder: Path,
    filler: Filler,
    amount: Amount,
    dtypes: Sequence[Dtype] = ("bfloat16", "float32"),
    told: Callable[[str], None] = lambda line: None,
    others: bool = True,
) -> list[Row]:
    """Rows of every codec on the model's own latents. told: hears of each row that is done, and in
    between of every quarter of its texts. others: also of those that are there to compare with."""
    rows = []
    estimates = [*map(shipped, SHIPPED), *(compared() if others else [])]
    with torch.inference_mode():
        for dtype in dtypes:
            most = max(amount.tokens, amount.context + PAGE_TOKENS)
            judge = _Judge(CodecReader(folder, dtype, most), filler, amount, dtype, told)
            for estimate in estimates:
                rows.append(judge.row(estimate))
                told(f"{dtype} {estimate.name}: {rows[-1].nats_change:+.6f} nats per byte")
    return rows


def speeds(pages: dict[str, Tensor], seconds: float = 0.3) -> list[Speed]:
    """Of every shipped codec on each of `pages`, latents [layers, 64, W] by what they are."""
    found = []
    for what, latents in pages.items():
        for codec in SHIPPED:
            item = page(latents)
            packed = pack(item, codec)
            base, out = packed.base(), torch.empty_like(latents)

            times = [
                _fastest(partial(pack, item, codec), seconds),
                _fastest(partial(_read, packed, out), seconds),
                _fastest(partial(_read, base, out), seconds),
            ]
            rates = [latents.nbytes / time / 1e9 for time in times]
            found.append(
                Speed(
                    codec=codec, what=what, encode=rates[0], decode=rates[1], estimate=rates[2],
                    ratio=packed.raw_bytes / packed.nbytes,
                )
            )  # fmt: skip
    return found


def k3_pages() -> dict[str, Tensor]:
    """Pages of K3's size with Gaussian values: for speed, not for quality."""
    values = torch.randn(K3_PAGE, generator=torch.Generator().manual_seed(0))
    return {"k3 bfloat16": values.bfloat16(), "k3 float32": values}


def recall_case(maker: Maker, rng: random.Random, length: int) -> Case:
    """Facts at all depths of a text, each asked for alone."""
    told = facts(rng, FACTS)
    places = [(at + rng.random()) / FACTS for at in range(FACTS)]
    ids, depths = maker.haystack(
        rng, length, [(place, fact.statement) for place, fact in zip(places, told, strict=True)]
    )
    probes = []
    for fact, depth in zip(told, depths, strict=True):
        writer = maker.writer().text(f"\n\nQuestion: {fact.question}\n\nAnswer: ", fact.head)
        probes.append(writer.answer(f" {fact.value}").probe(depth))
    return Case(tuple(ids), tuple(probes))


class _Judge:
    """The same texts for every codec, and what exact latents make of them."""

    def __init__(
        self,
        reader: CodecReader,
        filler: Filler,
        amount: Amount,
        dtype: str,
        told: Callable[[str], None],
    ) -> None:
        maker = Maker(reader.tokenizer, filler)
        self._reader, self._tokens, self._dtype, self._told = reader, amount.tokens, dtype, told
        self._windows = [
            maker.haystack(random.Random(f"window {at}"), amount.tokens, [])[0]
            for at in range(amount.windows)
        ]
        decode = reader.tokenizer.decode
        self._bytes = [len(decode(ids[1:]).encode()) for ids in self._windows]
        self._cases = [
            recall_case(maker, random.Random(f"case {at}"), amount.context)
            for at in range(amount.contexts)
        ]
        exact = shipped("raw")
        reader.read(self._windows[0], exact)
        self._queries = reader.queries()
        self._latents = reader.latents[:, : amount.tokens].clone()
        progress = self._progress("exact rows")
        self._exact = [list(pages) for pages in self._pages_of(exact, progress)]
        self._nats, _ = self._nats_of(self._exact)
        self._verdicts = self._verdicts_of(exact, progress)

    def row(self, estimate: Estimate) -> Row:
        again = self._latents.clone()
        reads = []
        for begin in range(SINKS * PAGE_TOKENS, self._tokens, PAGE_TOKENS):
            rows = again[:, begin : begin + PAGE_TOKENS]
            reads.append(estimate.of(rows))
            rows.copy_(reads[-1].latents)
        bits = fmean(read.bits for read in reads)
        exact = [read.exact_bits for read in reads if read.exact_bits is not None]
        nats, kl, verdicts = self._nats, 0.0, self._verdicts
        if estimate.name != "raw":  # which all others are compared with
            progress = self._progress(estimate.name)
            nats, kl = self._nats_of(self._pages_of(estimate, progress))
            verdicts = self._verdicts_of(estimate, progress)
        changes = [
            (new - old) / size for new, old, size in zip(nats, self._nats, self._bytes, strict=True)
        ]
        pairs = list(zip(verdicts, self._verdicts, strict=True))
        answers = [new.nats - old.nats for new, old in pairs]
        return Row(
            codec=estimate.name, dtype=self._dtype, shipped=estimate.name in SHIPPED,
            bits=bits, ratio=8 * again.dtype.itemsize / bits,
            exact_bits=fmean(exact) if exact else None,
            errors=errors(self._queries, self._latents, again, SINKS * PAGE_TOKENS),
            nats_per_byte=sum(nats) / sum(self._bytes),
            nats_change=(sum(nats) - sum(self._nats)) / sum(self._bytes),
            nats_error=_standard_error(changes), kl=kl,
            recall=fmean(verdict.right for verdict in verdicts), facts=len(verdicts),
            lost=sum(old.right and not new.right for new, old in pairs),
            gained=sum(new.right and not old.right for new, old in pairs),
            answer_change=fmean(answers), answer_error=_standard_error(answers),
        )  # fmt: skip

    def _progress(self, what: str) -> "_Progress":
        texts = len(self._windows) + len(self._cases)
        return _Progress(f"{self._dtype} {what}", texts, self._told)

    def _pages_of(self, estimate: Estimate, progress: "_Progress") -> Iterator[Iterator[Tensor]]:
        """Of each window its log probabilities, page by page."""
        for ids in self._windows:
            yield self._reader.log_probs(ids, estimate)
            progress.step()

    def _nats_of(self, reads: Iterable[Iterable[Tensor]]) -> tuple[list[float], float]:
        """Nats of each window without its first token, and KL per token of all. reads: see
        `_pages_of`."""
        nats, kl, tokens = [], 0.0, 0
        for pages, ids, exact in zip(reads, self._windows, self._exact, strict=True):
            targets, lost = torch.split(torch.tensor(ids[1:]), PAGE_TOKENS), 0.0
            for at, read in enumerate(pages):
                kl += float((exact[at].exp() * (exact[at] - read)).sum(dtype=torch.float64))
                tokens += len(read)
                if at < len(targets):
                    scored = read[: len(targets[at])].gather(1, targets[at][:, None])
                    lost -= float(scored.sum(dtype=torch.float64))
            nats.append(lost)
        return nats, kl / tokens

    def _verdicts_of(self, estimate: Estimate, progress: "_Progress") -> list[Verdict]:
        verdicts: list[Verdict] = []
        for case in self._cases:
            self._reader.read(case.context, estimate, RECALL_STEP)
            verdicts += self._reader.ask(case)
            progress.step()
        return verdicts


class _Progress:
    """Tells of every quarter of the texts that a row takes."""

    def __init__(self, what: str, texts: int, told: Callable[[str], None]) -> None:
        self._what, self._texts, self._told, self._done = what, texts, told, 0

    def step(self) -> None:
        before, self._done = self._done, self._done + 1
        if 4 * before // self._texts < 4 * self._done // self._texts:
            self._told(f"{self._what}: {self._done} of {self._texts} texts")


def _read(packed: Packed, out: Tensor) -> None:
    for layer in range(out.shape[0]):
        unpack_layer(packed, 0, layer, out[layer])


def _standard_error(values: list[float]) -> float:
    if len(values) < 2:
        return math.inf
    mean = sum(values) / len(values)
    spread = sum((value - mean) ** 2 for value in values) / (len(values) - 1)
    return math.sqrt(spread / len(values))


def _fastest(run: Callable[[], object], seconds: float) -> float:
    """Of this thread's own time: what else the machine does hardly shows."""
    run()
    best, end = math.inf, perf_counter() + seconds
    while perf_counter() < end:
        begin = thread_time()
        run()
        best = min(best, thread_time() - begin)
    return best
