"""The results of a GPU day as tables to read."""

from collections.abc import Mapping
from typing import Any

Results = Mapping[str, Any]


def table(results: Results) -> str:
    """All sections, and what failed or was left out, by name."""
    sections = results["sections"]
    parts = [
        _machine(_of(sections, "machine").get("facts", {}), _of(sections, "ceilings")),
        _correctness(sections),
        _timing(sections),
        _decode(_of(sections, "decode step")),
        _gone(sections),
    ]
    if results["dry_run"]:
        parts.insert(0, "DRY RUN on a CPU, in small: no number below means anything.")
    return "\n\n".join(part for part in parts if part)


def _of(sections: Results, name: str) -> dict[str, Any]:
    found: dict[str, Any] = sections.get(name, {}).get("results", {})
    return found


def _machine(facts: Results, ceilings: Results) -> str:
    versions = ", ".join(f"{k} {v}" for k, v in facts.get("versions", {}).items() if v)
    lines = [f"{facts.get('gpu', 'no GPU')}; {versions}; commit {facts.get('commit')}"]
    for name, found in ceilings.items():
        rate = found.get("bytes_per_s") or found.get("flops_per_s")
        unit = "TB/s" if "bytes_per_s" in found else "Tflop/s"
        lines.append(f"  {name:<5} {rate / 1e12:8.2f} {unit}")
    return "\n".join(lines)


def _correctness(sections: Results) -> str:
    rows = []
    for section in ("correctness: K3", "correctness: odd"):
        for item, found in _of(sections, section).items():
            for name, claim in found["claims"].items():
                bound = f"{claim['l2']:.1e} of {claim['l2_bound']:.1e}"
                rows.append([item, name, bound, f"{claim['worst']:.2f}", found["against"]])
    heads = ["held", "result", "L2 error of allowed", "worst element", "against"]
    return _grid(heads, rows) if rows else ""


def _timing(sections: Results) -> str:
    ceilings, baselines = _of(sections, "ceilings"), _of(sections, "baselines")
    peers = {found["ours"]: (name, found) for name, found in _of(sections, "peers").items()}
    rows = []
    for item, found in _of(sections, "timing").items():
        us = best_us(found)
        other, peer = baselines.get(item), peers.get(f"{found['operator']}/{found['phase']}")
        rows.append(
            [
                item,
                f"{us:.1f}",
                f"{found['call']['median_us']:.1f}",
                f"{found['floor_us']:.1f}",
                f"{us / found['floor_us']:.2f}" if found["floor_us"] else "-",
                share(found, us, ceilings),
                f"{best_us(other) / us:.2f}x" if other else "-",
                f"{best_us(peer[1]) / us:.2f}x {peer[0]}" if peer else "-",
            ]
        )
    heads = ["case", "us", "from Python", "floor", "ratio", "share", "torch", "peer"]
    return _grid(heads, rows) if rows else ""


def best_us(found: Results) -> float:
    """The device's time alone where a graph could be made of the call, else with launching."""
    us: float = (found.get("graph") or found["call"])["median_us"]
    return us


def share(found: Results, us: float, ceilings: Results) -> str:
    """Of what was measured on this machine: copied bytes for what memory bounds, else products."""
    by_memory = found["bound"] == "memory"
    name = "copy" if by_memory else found["unit"]
    ceiling = ceilings.get(name)
    if ceiling is None:
        return "-"
    best = ceiling["bytes_per_s" if by_memory else "flops_per_s"]
    amount = found["bytes" if by_memory else "flops"]
    return f"{100 * amount / (1e-6 * us) / best:.0f}% of {name}"


def _decode(found: Results) -> str:
    rows = [
        [
            item,
            f"{one['eager']['median_us']:.0f}",
            f"{one['graphs']['median_us']:.0f}",
            str(one["eager"]["asked"].get("launches", "-")),
            str(one["graphs"]["asked"].get("graphs", "-")),
            f"{one['largest_logit_difference']:.1e}",
        ]
        for item, one in found.items()
    ]
    heads = ["decode step", "eager us", "graphs us", "launches", "graph launches", "logits differ"]
    return _grid(heads, rows) if rows else ""


def _gone(sections: Results) -> str:
    lines = []
    for name, found in sections.items():
        for item, text in found["failed"].items():
            last = text.strip().splitlines()[-1] if text.strip() else "no reason"
            lines.append(f"FAILED {name}: {item}: {last[:300]}")
        if found["skipped"]:
            lines.append(f"skipped for time, {name}: {'; '.join(found['skipped'])}")
    return "\n".join(lines)


def _grid(heads: list[str], rows: list[list[str]]) -> str:
    widths = [max(map(len, column)) for column in zip(heads, *rows, strict=True)]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in [heads, *rows]
    )
