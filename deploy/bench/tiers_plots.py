"""Curves of `expertmesh bench tiers`, as PNG."""

from collections.abc import Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from expertmesh.deploy.bench.codecs import Row
from expertmesh.deploy.bench.tiers_hits import Hit
from expertmesh.deploy.bench.tiers_load import Load
from expertmesh.deploy.bench.tiers_memory import Memory
from expertmesh.deploy.eval.plots import COLOURS, log2_axis, ordered, save

MIB = 2**20


def plot_memory(found: Sequence[Memory], path: Path) -> None:
    """Accounted bytes on the device and PSS of the process, against the length of the prompt."""
    figure = Figure(figsize=(11, 3.6), layout="constrained")
    device, host, pss = figure.subplots(1, 3)
    lengths = sorted({one.tokens for one in found})
    for at, mode in enumerate(ordered(one.mode for one in found)):
        own = [one for one in found if one.mode == mode]
        tokens, colour = [one.tokens for one in own], COLOURS[at]
        held = [(one.near + one.index + one.recent) / MIB for one in own]
        device.plot(tokens, held, "o-", color=colour, label=mode)
        if any(one.scratch for one in own):
            with_scratch = [size + one.scratch / MIB for size, one in zip(held, own, strict=True)]
            device.plot(tokens, with_scratch, ":", color=colour)
        host.plot(tokens, [one.host / MIB for one in own], "o-", color=colour, label=mode)
        pss.plot(tokens, [one.pss / MIB for one in own], "o-", color=colour, label=mode)
        pss.plot(tokens, [one.peak_pss / MIB for one in own], ":", color=colour)
    device.set_title("on the device (dotted: with scratch)")
    host.set_title("old pages in host memory")
    pss.set_title("PSS of the process (dotted: peak)")
    for axis in (device, host, pss):
        log2_axis(axis, lengths)
        axis.set_yscale("symlog", base=2, linthresh=1)
        axis.yaxis.set_major_formatter("{x:g}")
    device.set_ylabel("MiB")
    host.legend(fontsize=8)
    figure.supxlabel("tokens of prompt", fontsize=10)
    save(figure, path)


def plot_load(found: Sequence[Load], path: Path) -> None:
    """Tokens per second, and time to the first token, against the number of clients."""
    figure = Figure(figsize=(8.5, 3.6), layout="constrained")
    rate, first = figure.subplots(1, 2)
    clients = sorted({one.clients for one in found})
    for at, system in enumerate(ordered(one.system for one in found)):
        own = [one for one in found if one.system == system]
        n, colour = [one.clients for one in own], COLOURS[at]
        rate.plot(n, [one.tokens_per_s for one in own], "o-", color=colour, label=system)
        first.plot(n, [one.first_p50_s * 1e3 for one in own], "o-", color=colour, label=system)
        first.plot(n, [one.first_p99_s * 1e3 for one in own], ":", color=colour)
    rate.set_title("generated tokens per second")
    first.set_title("ms to the first token: median, p99 dotted")
    first.set_yscale("log")
    for axis in (rate, first):
        log2_axis(axis, clients)
    rate.set_ylim(bottom=0)
    rate.legend(fontsize=8)
    figure.supxlabel("clients at the same time", fontsize=10)
    save(figure, path)


def plot_hits(found: Sequence[Hit], path: Path) -> None:
    """Time to the first token by tier, and how many times sooner it is than computing again."""
    figure = Figure(figsize=(8.5, 3.6), layout="constrained")
    seconds, ratio = figure.subplots(1, 2)
    lengths = sorted({one.tokens for one in found})
    cold = {one.tokens: one.recompute_s * 1e3 for one in found}
    seconds.plot(lengths, [cold[n] for n in lengths], "o-", color=COLOURS[-1], label="recompute")
    for at, tier in enumerate(ordered(one.tier for one in found)):
        own = [one for one in found if one.tier == tier]
        n, colour = [one.tokens for one in own], COLOURS[at]
        seconds.plot(n, [one.median_s * 1e3 for one in own], "o-", color=colour, label=tier)
        ratio.plot(n, [one.ratio for one in own], "o-", color=colour, label=tier)
    ratio.axhline(1, color="black", linewidth=0.8)
    seconds.set_title("ms to the first token")
    ratio.set_title("times sooner than computed again")
    for axis in (seconds, ratio):
        log2_axis(axis, lengths)
        axis.set_yscale("log")
    seconds.legend(fontsize=8)
    figure.supxlabel("tokens of prompt", fontsize=10)
    save(figure, path)


def plot_codecs(found: Sequence[Row], path: Path) -> None:
    """Rate against distortion: what a value's bits cost in rows, attention, prediction, recall."""
    figure = Figure(figsize=(11, 3.6), layout="constrained")
    rows, kl, recall = figure.subplots(1, 3)
    for at, dtype in enumerate(ordered(one.dtype for one in found)):
        own = [one for one in found if one.dtype == dtype]
        lossy = [one for one in own if one.errors.row_mse > 0]
        bits, colour = [one.bits for one in lossy], COLOURS[at]
        rows.plot(bits, [one.errors.row_mse for one in lossy], "o", color=colour,
                  label=f"{dtype}, rows")  # fmt: skip
        rows.plot(bits, [one.errors.output_mean**2 for one in lossy], "x", color=colour,
                  label=f"{dtype}, attention output")  # fmt: skip
        apart = [one.kl for one in lossy]
        kl.plot(bits, apart, "o", color=colour, label=dtype)
        recall.plot([one.bits for one in own], [one.recall for one in own], "o", color=colour)
        if at == 0:
            _name(kl, lossy, apart)
    rows.set_title("squared relative error")
    rows.set_yscale("log")
    kl.set_title("nats per token from what exact rows predict")
    kl.set_yscale("log")
    recall.set_title("share of facts given back")
    for axis in (rows, kl, recall):
        axis.grid(alpha=0.3)
    rows.legend(fontsize=8)
    figure.supxlabel("bits per value, as stored", fontsize=10)
    save(figure, path)


def _name(axis: Axes, rows: Sequence[Row], heights: Sequence[float]) -> None:
    for one, height in zip(rows, heights, strict=True):
        axis.annotate(one.codec, (one.bits, height), fontsize=7, xytext=(4, 4),
                      textcoords="offset points")  # fmt: skip
