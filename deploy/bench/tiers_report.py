"""What `expertmesh bench tiers` measures, prints and writes."""

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import torch
from rich.console import Console
from rich.table import Table

from expertmesh.actors.model.batch import PAGE_TOKENS
from expertmesh.deploy.bench.codecs import Amount, Row, frontier
from expertmesh.deploy.bench.residual import conditions
from expertmesh.deploy.bench.tiers_hits import Hit, hits
from expertmesh.deploy.bench.tiers_load import Load, Work, loads
from expertmesh.deploy.bench.tiers_memory import Memory, memory
from expertmesh.deploy.bench.tiers_recall import Point, recall
from expertmesh.deploy.eval.cases import Maker
from expertmesh.deploy.eval.filler import Prose
from expertmesh.deploy.eval.subject import Subject
from expertmesh.deploy.exit_codes import ExitCode, Refused
from expertmesh.deploy.preflight import check_folder

PARTS = ("memory", "load", "hits", "recall", "codecs")
ROOM_TOKENS = 1024


class Wish(msgspec.Struct, frozen=True, kw_only=True):
    """The command's options."""

    model: Path
    parts: list[str]
    lengths: list[int]
    trials: int
    probes: int
    out: Path | None
    threads: int
    as_json: bool


class Measured(msgspec.Struct, kw_only=True):
    memory: list[Memory] = []
    load: list[Load] = []
    hits: list[Hit] = []
    recall: list[Point] = []
    codecs: list[Row] = []


def run_tiers(wish: Wish) -> None:
    """Raises Refused."""
    for part in wish.parts:
        if part not in PARTS:
            raise Refused(ExitCode.USAGE, f"no part {part!r}", f"there are {', '.join(PARTS)}")
    check_folder(wish.model)
    torch.set_num_threads(wish.threads)
    console = Console(stderr=True, highlight=False)
    try:
        measured = measure(wish, lambda line: console.print(line))
    except RuntimeError as error:
        raise Refused(ExitCode.FAILED, str(error)) from None
    report: dict[str, Any] = {
        "bench": "tiers", "conditions": {"model": wish.model.name, **conditions()},
        "crossover": crossover(wish.model), **msgspec.to_builtins(measured),
    }  # fmt: skip
    if wish.out is not None:
        write(wish.out, report, measured)
    if wish.as_json:
        print(msgspec.json.encode(report).decode())
    else:
        _print(measured)


def measure(wish: Wish, told: Callable[[str], None]) -> Measured:
    """Each part that is wished for. Raises EngineEnded or RuntimeError."""
    measured, parts = Measured(), wish.parts or list(PARTS)
    if "memory" in parts:
        measured.memory = memory(wish.model, wish.lengths, told=told)
    subject = Subject(wish.model, max(wish.lengths) + ROOM_TOKENS)
    with tempfile.TemporaryDirectory(prefix="expertmesh-tiers-") as folder:
        if "hits" in parts:
            measured.hits = hits(subject, wish.lengths, wish.trials, Path(folder) / "hits", told)
        if "load" in parts:
            measured.load = loads(subject, Work(), Path(folder) / "load", told)
    if "recall" in parts:
        maker = Maker(subject.tokenizer, Prose())
        measured.recall = recall(subject, maker, wish.lengths, wish.probes, told)
    if "codecs" in parts:
        measured.codecs = frontier(wish.model, Prose(), Amount(), told=told)
    return measured


def crossover(model: Path) -> dict[str, float]:
    """Tokens whose latents take as many bytes as one snapshot: of this model in float32, and of K3
    with bfloat16 latents (kv-state 1)."""
    subject = Subject(model, 1)
    return {
        model.name: subject.slot_bytes / subject.page_bytes * PAGE_TOKENS,
        "Kimi K3": 16_253.0,
    }


def write(folder: Path, report: dict[str, Any], measured: Measured) -> None:
    """tiers.json, and a PNG for each part that was measured."""
    from expertmesh.deploy.bench import tiers_plots as plots

    folder.mkdir(parents=True, exist_ok=True)
    text = msgspec.json.format(msgspec.json.encode(report), indent=1)
    (folder / "tiers.json").write_bytes(text + b"\n")
    if measured.memory:
        plots.plot_memory(measured.memory, folder / "memory.png")
    if measured.load:
        plots.plot_load(measured.load, folder / "load.png")
    if measured.hits:
        plots.plot_hits(measured.hits, folder / "hits.png")
    if measured.recall:
        plots.plot_recall(measured.recall, folder / "recall.png")
    if measured.codecs:
        plots.plot_codecs(measured.codecs, folder / "codecs.png")


def _print(measured: Measured) -> None:
    console = Console(highlight=False)
    for title, rows in (
        ("Memory of one sequence", [_memory(one) for one in measured.memory]),
        ("Time to the first token", [_hit(one) for one in measured.hits]),
        ("Throughput", [_load(one) for one in measured.load]),
        ("Recall by what stays resident", [_point(one) for one in measured.recall]),
        ("Codecs", [_codec(one) for one in measured.codecs]),
    ):
        if rows:
            table = Table(*rows[0], title=title, title_justify="left")
            for column in table.columns[2:]:
                column.justify = "right"
            for row in rows:
                table.add_row(*row.values())
            console.print(table)


def _memory(one: Memory) -> dict[str, str]:
    return {
        "mode": one.mode, "tokens": str(one.tokens),
        "resident MiB": _mib(one.near + one.index + one.recent), "of full": f"{one.share:.1%}",
        "scratch": _mib(one.scratch), "host": _mib(one.host), "PSS": _mib(one.pss),
        "peak PSS": _mib(one.peak_pss),
    }  # fmt: skip


def _hit(one: Hit) -> dict[str, str]:
    return {
        "tier": one.tier, "tokens": str(one.tokens), "cached": str(one.cached_tokens),
        "ms": _ms(one.median_s), "p99": _ms(one.p99_s), "again ms": _ms(one.recompute_s),
        "ratio": f"{one.ratio:.1f}", "by CPU": f"{one.cpu_ratio:.1f}",
        "read MiB": _mib(one.read_bytes), "ms ": _ms(one.read_s), "verify": _ms(one.verify_s),
    }  # fmt: skip


def _load(one: Load) -> dict[str, str]:
    return {
        "system": one.system, "clients": str(one.clients), "tokens/s": f"{one.tokens_per_s:.0f}",
        "first ms": _ms(one.first_p50_s), "p99": _ms(one.first_p99_s),
        "hits": ", ".join(f"{tier} {share:.0%}" for tier, share in one.hits.items()),
        "bytes/token": ", ".join(f"{t} {n / 1024:.0f} KiB" for t, n in one.read_bytes.items() if n),
    }  # fmt: skip


def _point(one: Point) -> dict[str, str]:
    cell = one.cell
    loss = cell.loss
    return {
        "task": cell.task, "mode": cell.mode, "tokens": str(cell.length),
        "resident": f"{one.share:.1%}", "right": f"{cell.recall.right}/{cell.recall.n}",
        "points lost": "" if loss is None else f"{loss.points:+.1f}",
        "nats": f"{cell.nats:.3f}", "KL": f"{cell.divergence:.4f}",
        "pages/step": f"{one.read_pages:.1f}",
        "judged": "yes" if cell.judged else "no",
    }  # fmt: skip


def _codec(one: Row) -> dict[str, str]:
    return {
        "codec": one.codec, "dtype": one.dtype, "bits": f"{one.bits:.2f}",
        "ratio": f"{one.ratio:.2f}", "nats/byte": f"{one.nats_change:+.5f}", "KL": f"{one.kl:.5f}",
        "recall": f"{one.recall:.1%}", "lost": f"{one.lost}/{one.facts}",
    }  # fmt: skip


def _mib(size: int) -> str:
    return f"{size / 2**20:.1f}"


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.1f}"
