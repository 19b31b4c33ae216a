"""`python -m tests.bench state_certificates [--checks 100000000] [--context 16384]`

Bounds of estimates against the truth (kv-state 3.3, goal G7), for rows of the bundled model and for
synthetic ones as wide as K3's:

- scores: for every (head, query, page) both ends of the interval that scores of the page are said
  to lie in, [min, max] of estimate -+ slack, are held against exact scores;
- outputs: attention over a base, pages read exactly until the certificate is small enough; how far
  the output really is from the exact one, how much was read, and how often all had to be.

"violations" must be 0. tightness: certified / actual error of a head's output.
"""

import argparse
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from expertmesh.actors.model.batch import PAGE_TOKENS
from expertmesh.actors.model.layers import Mla
from expertmesh.actors.state.offload.attend import attend
from expertmesh.actors.state.offload.base_rows import GROUP_PAGES, BaseRows
from expertmesh.actors.state.offload.certify import ROUNDING, bound, terms, worst_pages
from tests.bench.models import NANO
from tests.support.runner import Runner

HOT_PAGES = 17  # sinks and a window of 1,024
TOLERANCES = (1e-1, 1e-2)
PEAKS = (5.0, 10.0, 14.0, 18.0, 24.0)  # nats above the mean score: what is said of sharp heads


class Scene(NamedTuple):
    """rows [T, C], float32. queries [n, H, C]: absorbed. scale: of scores. rank: R."""

    name: str
    rows: Tensor
    queries: Tensor
    scale: float
    rank: int


@dataclass
class Outputs:
    """Of heads of one peak. read: share of old rows read exactly."""

    heads: int = 0
    violations: int = 0
    fallbacks: int = 0
    ratios: list[float] = field(default_factory=list)
    read: list[float] = field(default_factory=list)

    def told(self) -> dict[str, Any]:
        made: dict[str, Any] = {
            "heads": self.heads, "violations": self.violations, "all_read": self.fallbacks,
        }  # fmt: skip
        if self.ratios:
            edges = [0, 3, 10, 30, 100, 300, 1000, 1e4, np.inf]
            counts = np.histogram(self.ratios, edges)[0].tolist()
            names = [f"<= {edge:g}" for edge in edges[1:-1]] + ["more"]
            made["median_tightness"] = round(float(np.median(self.ratios)), 1)
            made["tightness"] = dict(zip(names, counts, strict=True))
        if self.read:
            made["median_rows_read"] = round(float(np.median(self.read)), 4)
            made["most_rows_read"] = round(max(self.read), 4)
        return made


def main(arguments: list[str]) -> dict[str, Any]:
    parser = argparse.ArgumentParser(prog="state_certificates")
    parser.add_argument("--checks", type=int, default=100_000_000)
    parser.add_argument("--context", type=int, default=16_384, help="tokens of each scene")
    parser.add_argument("--heads", type=int, default=96, help="whose outputs are certified")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    scenes = [*nano_scenes(options.context), wide_scene(options.context)]
    # Each scene gets about as much time: a check costs by the row's width.
    parts = [1 / scene.rows.shape[1] for scene in scenes]
    each = {
        scene.name: int(options.checks * part / sum(parts) / 2) + 1
        for scene, part in zip(scenes, parts, strict=True)
    }
    return {
        "scores": [
            check_scores(scene, bits, each[scene.name]) for scene in scenes for bits in (8, 4)
        ],
        "outputs": [
            {"rows": scene.name, "bits": bits, "tolerance": tolerance, "read_at_a_time": unit}
            | certify(scene, bits, tolerance, options.heads, unit)
            for scene in scenes
            for bits in (8, 4)
            for tolerance in TOLERANCES
            for unit in (PAGE_TOKENS, 1)
        ],
    }


# --- rows and queries -----------------------------------------------------------------------------


def nano_scenes(context: int) -> Iterator[Scene]:
    """Both MLA layers of the bundled model after a text of random words of its own vocabulary."""
    runner = Runner(NANO, slots=1, pages_each=context // PAGE_TOKENS)
    draw = torch.Generator().manual_seed(0)
    words = torch.randint(0, 1900, (512,), generator=draw)
    ids = words[torch.randint(0, 512, (context,), generator=draw)].tolist()
    for begin in range(0, context, 1024):
        runner.step([(0, ids[begin : begin + 1024], False)])
    layers = [layer for layer in runner.model.attention if isinstance(layer, Mla)]
    for at, layer in enumerate(layers):
        rows = runner.state.latents[at, :context].clone()
        assert layer.q_norm is not None and layer.q_up is not None
        inputs = torch.randn(4096, layer.q_norm.shape[0], generator=draw) * layer.q_norm
        q_n, q_r = layer.q_up(inputs).view(4096, layer.heads, -1).split([layer.nope, layer.rope], 2)
        q = torch.cat([torch.einsum("thd,hdr->thr", q_n, layer.w_k_HdR), q_r], dim=2)
        yield Scene(f"nano, MLA layer {at}", rows, q.detach(), layer.scale, layer.rank)


def wide_scene(context: int) -> Scene:
    """512 + 64 columns with a 1/i spectrum, normalised as latents are; queries through random
    matrices of 16 heads, aligned with one token each."""
    rank, rope, heads, nope = 512, 64, 16, 128
    draw = torch.Generator().manual_seed(1)
    spectrum = torch.arange(1, rank + rope + 1).float().rsqrt()
    mix, _ = torch.linalg.qr(torch.randn(rank + rope, rank + rope, generator=draw))
    rows = torch.randn(context, rank + rope, generator=draw) * spectrum @ mix
    rows[:, :rank] /= rows[:, :rank].square().mean(dim=1, keepdim=True).sqrt()
    w_k = torch.randn(heads, nope, rank, generator=draw) / rank**0.5
    aims = rows[torch.randint(0, context, (256,), generator=draw)]
    q_n = torch.einsum("tr,hdr->thd", aims[:, :rank], w_k)
    q_n += torch.randn(q_n.shape, generator=draw)
    q_r = aims[:, None, rank:].expand(-1, heads, -1)
    q = torch.cat([torch.einsum("thd,hdr->thr", q_n, w_k), q_r], dim=2)
    return Scene("synthetic, 576 wide", rows, q, (nope + rope) ** -0.5, rank)


class Decoded(BaseRows):
    """Decodes its rows once, not for each question."""

    def groups(self) -> Iterator[tuple[Tensor, Tensor]]:
        if len(self._kept) * GROUP_PAGES < self.pages:
            self._kept = list(super().groups())
        return iter(self._kept)

    _kept: tuple[tuple[Tensor, Tensor], ...] | list[tuple[Tensor, Tensor]] = ()


def based(rows: Tensor, bits: int) -> BaseRows:
    base = Decoded(bits, rows.shape[1], rows.device)
    for page in rows.view(-1, PAGE_TOKENS, rows.shape[1]):
        base.add(page)
    return base


# --- scores ---------------------------------------------------------------------------------------


def check_scores(scene: Scene, bits: int, checks: int) -> dict[str, Any]:
    """Every page's interval of scores against exact ones, for as many queries as it takes."""
    base, pages = based(scene.rows, bits), scene.rows.shape[0] // PAGE_TOKENS
    estimates_TC = torch.cat([rows for rows, _ in base.groups()])
    errors_T = torch.cat([errors for _, errors in base.groups()])
    longest = float(scene.rows.norm(dim=1).max())
    done = violations = 0
    slack = used = 0.0
    draw = torch.Generator().manual_seed(2)
    while done < checks:
        q = scene.queries[torch.randint(0, len(scene.queries), (16,), generator=draw)].flatten(0, 1)
        # No two rounds ask the same: queries between those of the model.
        q = (q + 0.3 * q.roll(1, 0) * torch.rand(len(q), 1, generator=draw)) * scene.scale
        length_Q1 = q.norm(dim=1, keepdim=True)
        score_QT = q @ estimates_TC.t()
        slack_QT = length_Q1 * errors_T
        truth_QT = q @ scene.rows.t()
        used += float((score_QT[0] - truth_QT[0]).abs().mean()) * len(q) * pages
        slack += float(slack_QT[0].mean()) * len(q) * pages
        # Both products are rounded: what is claimed of the scores allows for that.
        slack_QT += ROUNDING * length_Q1 * longest
        high = (score_QT + slack_QT).view(len(q), pages, PAGE_TOKENS).amax(dim=2)
        low = score_QT.sub_(slack_QT).view(len(q), pages, PAGE_TOKENS).amin(dim=2)
        truth_QNP = truth_QT.view(len(q), pages, PAGE_TOKENS)
        violations += int(((truth_QNP.amax(dim=2) > high) | (truth_QNP.amin(dim=2) < low)).sum())
        done += high.numel()
    return {
        "rows": scene.name, "bits": bits, "checks": done, "violations": violations,
        "mean_slack_nats": round(slack / done, 4), "mean_error_nats": round(used / done, 5),
    }  # fmt: skip


# --- outputs --------------------------------------------------------------------------------------


def certify(scene: Scene, bits: int, tolerance: float, heads: int, unit: int) -> dict[str, Any]:
    """Each head by itself, made as sharp as each of PEAKS says, reads pages of `unit` tokens until
    its certificate is below `tolerance` of its output. By peak: see Outputs."""
    hot_KC, old_TC = scene.rows[: HOT_PAGES * PAGE_TOKENS], scene.rows[HOT_PAGES * PAGE_TOKENS :]
    base, found = based(old_TC, bits), {peak: Outputs() for peak in PEAKS}
    draw = torch.Generator().manual_seed(3)
    count = max(1, heads // scene.queries.shape[1])
    asked = scene.queries[torch.randint(0, len(scene.queries), (count,), generator=draw)]
    for peak in PEAKS:
        for q_HC in asked:
            spread_H = q_HC @ scene.rows.t() * scene.scale
            above_H1 = (spread_H.amax(dim=1) - spread_H.mean(dim=1)).unsqueeze(1)
            for q_1C in (q_HC * peak / above_H1).split(1):
                _one_head(q_1C, hot_KC, old_TC, base, scene, tolerance, unit, found[peak])
    return {"by_peak_nats": {f"{peak:g}": one.told() for peak, one in found.items()}}


def _one_head(
    q_1C: Tensor,
    hot_KC: Tensor,
    old_TC: Tensor,
    base: BaseRows,
    scene: Scene,
    tolerance: float,
    unit: int,
    outputs: Outputs,
) -> None:
    scored = base.score(q_1C, scene.scale)
    hot_1K = q_1C @ hot_KC.t() * scene.scale
    old_NPC = old_TC.view(-1, unit, old_TC.shape[1])
    chosen = torch.empty(0, dtype=torch.int64)
    outputs.heads += 1
    for _ in range(3):  # the first tells where the worst pages are
        rows_KC = old_NPC[chosen].flatten(0, 1)
        guess_1T = scored.scores_HT.clone()
        guess_1T.view(-1, unit)[chosen] = float("-inf")
        scores = torch.cat([hot_1K, q_1C @ rows_KC.t() * scene.scale], dim=1)
        found = attend(torch.cat([hot_KC, rows_KC]), scores, guess_1T, base, scene.rank)
        distance_HT, errors_T = base.spread(found.out_HR)
        term_HT, growth_HT = terms(found.weights_HT, scored.slack_HT, distance_HT, errors_T)
        length = float(found.out_HR.norm())
        certified = float(bound(term_HT, growth_HT, found.out_HR)) / length
        if certified <= tolerance:
            break
        more = worst_pages(term_HT, growth_HT, found.out_HR, tolerance / 2, unit)
        chosen = torch.cat([chosen, more]).unique()
    read = len(chosen) / len(old_NPC)
    if certified > tolerance or read == 1:
        outputs.fallbacks += 1
        return
    rows = torch.cat([hot_KC, old_TC]).double()
    weights = (q_1C.double() @ rows.t() * scene.scale).softmax(dim=1)
    actual = float((found.out_HR - weights @ rows[:, : scene.rank]).norm()) / length
    outputs.violations += actual > certified
    outputs.ratios.append(certified / max(actual, 1e-12))
    outputs.read.append(read)
