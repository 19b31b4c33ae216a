"""What `expertmesh bench tiers` measures, prints and writes."""

import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import torch

from expertmesh.actors.model.batch import PAGE_TOKENS
from expertmesh.actors.model.config import ModelConfig
from expertmesh.actors.state.model_state import bytes_per_page, bytes_per_slot
from expertmesh.deploy.bench.codecs import Amount, Row, frontier
from expertmesh.deploy.bench.residual import conditions
from expertmesh.deploy.bench.tiers_hits import Hit, hits
from expertmesh.deploy.bench.tiers_load import Load, Work, loads
from expertmesh.deploy.bench.tiers_memory import Memory, memory
from expertmesh.deploy.bench.tiers_recall import TASKS as RECALL_TASKS
from expertmesh.deploy.bench.tiers_recall import recall
from expertmesh.deploy.eval.cases import Maker
from expertmesh.deploy.eval.console import progress_console, report_console, report_table
from expertmesh.deploy.eval.filler import Prose
from expertmesh.deploy.eval.longcontext import Cell
from expertmesh.deploy.eval.subject import Subject
from expertmesh.deploy.eval.tasks import check_tasks
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
    cold_trials: int
    probes: int
    tasks: list[str]
    out: Path | None
    threads: int
    as_json: bool


class Measured(msgspec.Struct, kw_only=True):
    memory: list[Memory] = []
    load: list[Load] = []
    hits: list[Hit] = []
    recall: list[Cell] = []
    codecs: list[Row] = []


def run_tiers(wish: Wish) -> None:
    """Raises Refused. With `out`, a part is on the disk as soon as it has ended."""
    for part in wish.parts:
        if part not in PARTS:
            raise Refused(ExitCode.USAGE, f"no part {part!r}", f"there are {', '.join(PARTS)}")
    check_tasks(wish.tasks)
    config = check_folder(wish.model)
    torch.set_num_threads(wish.threads)
    console = progress_console()
    known = {
        "bench": "tiers", "conditions": {"model": wish.model.name, **conditions()},
        "crossover": {wish.model.name: crossover(config), "Kimi K3": 16_253.0},
    }  # fmt: skip
    measured = Measured()
    try:
        for part, rows in measure(wish, lambda line: console.print(line)):
            setattr(measured, part, rows)
            if wish.out is not None:
                write(wish.out, known, measured, part)
    except RuntimeError as error:
        raise Refused(ExitCode.FAILED, str(error)) from None
    if wish.as_json:
        print(msgspec.json.encode(known | msgspec.to_builtins(measured)).decode())
    else:
        _print(measured)


def measure(wish: Wish, told: Callable[[str], None]) -> Iterator[tuple[str, Sequence[Any]]]:
    """Each part that is wished for, as soon as it has ended, with its rows. Raises EngineEnded or
    RuntimeError."""
    parts = wish.parts or PARTS
    if "memory" in parts:
        yield "memory", memory(wish.model, wish.lengths, told=told)
    subject = Subject(wish.model, max(wish.lengths) + ROOM_TOKENS)
    with tempfile.TemporaryDirectory(prefix="expertmesh-tiers-") as folder:
        if "hits" in parts:
            own = Path(folder) / "hits"
            yield "hits", hits(subject, wish.lengths, wish.trials, own, told, wish.cold_trials)
        if "load" in parts:
            yield "load", loads(subject, Work(), Path(folder) / "load", told)
    if "recall" in parts:
        maker = Maker(subject.tokenizer, Prose())
        yield (
            "recall",
            recall(
                subject, maker, wish.lengths, wish.probes, told, tasks=wish.tasks or RECALL_TASKS
            ),
        )
    if "codecs" in parts:
        yield "codecs", frontier(wish.model, Prose(), Amount(), told=told)


def crossover(config: ModelConfig) -> float:
    """Tokens whose latents take as many bytes as one snapshot, in float32 (kv-state 1)."""
    dtype = torch.float32
    return bytes_per_slot(config, dtype) / bytes_per_page(config, dtype) * PAGE_TOKENS


def write(folder: Path, known: dict[str, Any], measured: Measured, part: str) -> None:
    """tiers.json with all that has been measured, and the PNG of this part. A run that is ended in
    the middle of it leaves the file as it was."""
    from expertmesh.deploy.bench import tiers_plots as plots
    from expertmesh.deploy.eval.curves import plot_curves

    folder.mkdir(parents=True, exist_ok=True)
    report = known | msgspec.to_builtins(measured)
    partial = folder / "tiers.json.partial"
    partial.write_bytes(msgspec.json.format(msgspec.json.encode(report), indent=1) + b"\n")
    partial.replace(folder / "tiers.json")
    plot: Callable[[Any, Path], None] = plot_curves
    if part != "recall":
        plot = getattr(plots, f"plot_{part}")
    plot(getattr(measured, part), folder / f"{part}.png")


def _print(measured: Measured) -> None:
    console = report_console()
    for title, rows in (
        ("Memory of one sequence", [_memory(one) for one in measured.memory]),
        ("Time to the first token", [_hit(one) for one in measured.hits]),
        ("Throughput", [_load(one) for one in measured.load]),
        ("Recall by what stays resident", [_point(one) for one in measured.recall]),
        ("Codecs", [_codec(one) for one in measured.codecs]),
    ):
        if rows:
            table = report_table(title, rows[0], 2)
            for row in rows:
                table.add_row(*row.values())
            console.print(table)


def _memory(one: Memory) -> dict[str, str]:
    return {
        "mode": one.mode, "tokens": str(one.tokens),
        "resident MiB": _mib(one.near + one.index + one.recent), "of full": f"{one.share:.1%}",
        "scratch": _mib(one.scratch), "host": _mib(one.host), "disk": _mib(one.disk),
        "PSS": _mib(one.pss), "peak PSS": _mib(one.peak_pss), "ms a token": _ms(one.token_s),
    }  # fmt: skip


def _hit(one: Hit) -> dict[str, str]:
    return {
        "tier": one.tier, "tokens": str(one.tokens), "cached": str(one.cached_tokens),
        "ms": _ms(one.median_s), "p99": _ms(one.p99_s), "again ms": _ms(one.recompute_s),
        "again p99": _ms(one.recompute_p99_s), "ratio": f"{one.ratio:.1f}",
        "slower": f"{one.slower:.0%}", "CPU ms": _ms(one.cpu_s),
        "again CPU": _ms(one.recompute_cpu_s), "by CPU": f"{one.cpu_ratio:.1f}",
        "read MiB": f"{one.read_bytes / 2**20:.2f}", "read ms": _ms(one.read_s),
        "verify": _ms(one.verify_s), "trials": f"{one.trials}, {one.cold_trials}",
    }  # fmt: skip


def _load(one: Load) -> dict[str, str]:
    return {
        "system": one.system, "clients": str(one.clients), "tokens/s": f"{one.tokens_per_s:.0f}",
        "first ms": _ms(one.first_p50_s), "p99": _ms(one.first_p99_s), "same": f"{one.same:.0%}",
        "hits": ", ".join(f"{tier} {share:.0%}" for tier, share in one.hits.items()),
        "bytes/token": ", ".join(f"{t} {n / 1024:.0f} KiB" for t, n in one.read_bytes.items() if n),
    }  # fmt: skip


def _point(one: Cell) -> dict[str, str]:
    loss, needs, tokens, reading = one.loss, one.needs, one.needs_tokens, one.reading
    assert needs is not None and tokens is not None
    return {
        "task": one.task, "mode": one.mode, "tokens": str(one.length),
        "on device": f"{one.share:.1%}", "right": f"{one.recall.right}/{one.recall.n}",
        "points lost": "" if loss is None else f"{loss.points:+.1f}",
        "need latents": f"{needs.right}/{needs.n}", "their tokens": f"{tokens.right}/{tokens.n}",
        "same": f"{one.same.share:.2%}", "KL": f"{one.divergence:.2g}",
        "pages/step": "" if reading is None else f"{reading.per_step:.1f}",
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
