"""Would a model start here: its headers, and its memory against what is available."""

from collections.abc import Iterator
from pathlib import Path

from expertmesh.actors.attention.settings import EngineSettings
from expertmesh.actors.model.loading import LoadSettings
from expertmesh.deploy import preflight
from expertmesh.deploy.doctor.findings import Finding, judged
from expertmesh.deploy.exit_codes import Refused
from expertmesh.deploy.preflight import size_text

SECTION = "model"


def check_model(folder: Path) -> Iterator[Finding]:
    """As `expertmesh serve` would hold it in one process on this machine."""
    try:
        config = preflight.check_folder(folder)
        summary = preflight.check_checkpoint(folder, config)
    except Refused as refused:
        yield Finding(SECTION, folder.name, "fail", refused.message, refused.hint)
        return
    parameters = summary.attention.parameters + summary.experts.parameters
    value = (
        f"{config.family}, {parameters / 1e6:,.1f} M parameters, {size_text(summary.text_bytes)}"
    )
    yield Finding(SECTION, folder.name, "ok", value)
    plan = preflight.plan_memory(
        config, summary, LoadSettings(model=folder), EngineSettings(), 1, 0
    )
    free = preflight.available_memory()
    yield judged(
        SECTION, "memory", f"{size_text(plan.total)} in one process, {size_text(free)} available",
        plan.total <= free,
        "more machines, --dtype bfloat16, a smaller --expert-cache-gb or fewer --kv-pages",
    )  # fmt: skip
