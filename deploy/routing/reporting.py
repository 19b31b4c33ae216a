"""What the commands of `expertmesh routing` do: get a report, and show it in three forms."""

import io
import sys
from dataclasses import dataclass
from pathlib import Path

import msgspec
from rich.console import Console

from expertmesh.cluster.ledger.recording import Recording, RecordingError, load_recording
from expertmesh.cluster.ledger.report import Report
from expertmesh.deploy.admin_http import ask
from expertmesh.deploy.exit_codes import ExitCode, Refused
from expertmesh.deploy.routing.heat_map import write_heat_map
from expertmesh.deploy.routing.tables import print_report

# The server plans and packs after the recording has ended.
PACK_SECONDS = 60.0


@dataclass(frozen=True)
class Outputs:
    """json: "-" prints the numbers in place of the table."""

    png: Path | None = None
    json: Path | None = None
    all_layers: bool = False


def run_report(recording: Path | None, url: str, outputs: Outputs) -> None:
    """Raises Refused."""
    report = _of_server(url) if recording is None else _of_file(recording).report()
    text = msgspec.json.format(msgspec.json.encode(report), indent=1)
    if outputs.json == Path("-"):
        print(text.decode())
    else:
        print_report(report, Console(), outputs.all_layers)
    try:
        if outputs.json not in (None, Path("-")):
            outputs.json.write_bytes(text + b"\n")  # type: ignore[union-attr]
        if outputs.png is not None:
            write_heat_map(report, outputs.png)
    except OSError as error:
        raise Refused(ExitCode.USAGE, str(error)) from error


def run_record(output: Path, url: str, seconds: float, tokens: int) -> None:
    """Raises Refused."""
    if not output.absolute().parent.is_dir():
        raise Refused(ExitCode.USAGE, f"there is no folder {output.absolute().parent}")
    wish = {"seconds": seconds, "tokens": tokens}
    packed = ask(url, "/mesh/routing/record", wish, timeout=seconds + PACK_SECONDS)
    try:
        recording = load_recording(io.BytesIO(packed))
    except RecordingError as error:
        raise Refused(ExitCode.UNREACHABLE, f"{url}: {error}") from error
    try:
        output.write_bytes(packed)
    except OSError as error:
        raise Refused(ExitCode.USAGE, str(error)) from error
    print(
        f"{output}: {len(recording.trace_NLK)} tokens in {recording.seconds:.1f} s, "
        f"{len(recording.layers)} layers x {recording.experts} experts"
    )
    if not len(recording.trace_NLK):
        print("warning: no request was served meanwhile; the record is empty", file=sys.stderr)


def _of_server(url: str) -> Report:
    try:
        return msgspec.json.decode(ask(url, "/mesh/routing"), type=Report)
    except msgspec.DecodeError as error:
        raise Refused(
            ExitCode.UNREACHABLE, f"{url} does not answer like an ExpertMesh server: {error}"
        ) from error


def _of_file(path: Path) -> Recording:
    try:
        return load_recording(path)
    except (OSError, RecordingError) as error:
        raise Refused(ExitCode.USAGE, str(error)) from error
