"""The checks of `expertmesh verify` in their order; the loader's own checks do the refusing."""

from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

from expertmesh.actors.model.checkpoint import Checkpoint
from expertmesh.actors.model.config import ModelConfig
from expertmesh.actors.model.problems import CheckpointError, Problem
from expertmesh.actors.model.shard import Shard, is_lfs_pointer
from expertmesh.actors.model.shard_set import FolderSurvey, survey_folder
from expertmesh.actors.model.summary import CheckpointSummary
from expertmesh.actors.model.validate import survey_tensors
from expertmesh.deploy.exit_codes import ExitCode, Refused
from expertmesh.deploy.preflight import check_folder
from expertmesh.deploy.verify.contents import Count, read_plain, read_shard_values
from expertmesh.deploy.verify.findings import Finding, Findings, Severity
from expertmesh.deploy.verify.manifest import Listed, new_hasher
from expertmesh.deploy.verify.side_files import check_side_files

# What a manifest that leaves it out does not describe the model without.
_PARTS = (".safetensors", ".json", ".model", ".py", ".jinja")


@dataclass(slots=True)
class Verified:
    """summary: None where the headers do not fit the config. digests: name -> (size, hex), of the
    files that were hashed."""

    findings: Findings
    summary: CheckpointSummary | None
    digests: dict[str, tuple[int, str]]
    bytes_read: int


def verify(
    folder: Path,
    *,
    quick: bool = False,
    listed: Mapping[str, Listed] | None = None,
    hash_all: str | None = None,
    apart: frozenset[Path] = frozenset(),
    threads: int = 1,
    progress: bool = False,
) -> Verified:
    """listed: a manifest to compare with. hash_all: an algorithm, to digest every file with.
    apart: files in the folder that are not part of the model. Raises Refused when there is none.
    """
    findings = Findings()
    config = _config(folder, findings)
    survey = _survey(folder, findings)
    summary = None
    if config is not None:
        check_side_files(folder, config, findings)
        if survey is not None:
            summary = _compare_headers(folder, config, survey, findings, quick)
    files = _files(folder, apart, listed or {})
    findings.take("files", _pointers(files))
    against = _Manifest(listed or {}, findings)
    if listed is not None:
        against.compare_names(files)
    reader = _Reader(folder, survey.shards if survey else [], findings)
    if not quick:
        wanted = {name: [hash_all] if hash_all else [] for name in files}
        against.ask(wanted)
        reader.read(wanted, threads, progress)
        against.compare_digests(reader.digests)
    made = {
        name: (size, found[hash_all])
        for name, (size, found) in reader.digests.items()
        if hash_all is not None and hash_all in found
    }
    return Verified(findings, summary, made, reader.bytes_read)


def _config(folder: Path, findings: Findings) -> ModelConfig | None:
    try:
        return check_folder(folder)
    except Refused as refused:
        if refused.code is not ExitCode.BAD_CHECKPOINT:
            raise
        text = refused.message.replace(f"{folder}/", "")
        findings.take("config", [Problem(text, text.split(":", 1)[0])])
        return None


def _survey(folder: Path, findings: Findings) -> FolderSurvey | None:
    try:
        survey = survey_folder(folder)
    except CheckpointError as error:
        findings.take("files", [error.problem])
        return None
    findings.take("files", survey.problems)
    findings.take("files", survey.warnings, "warning")
    return survey


def _compare_headers(
    folder: Path, config: ModelConfig, survey: FolderSurvey, findings: Findings, quick: bool
) -> CheckpointSummary | None:
    """Tensors against the config. What an unreadable shard holds is not also told as missing."""
    found = survey_tensors(config, survey.shards)
    missing = [
        one
        for one in found.missing
        if survey.weight_map.get(one.tensor) not in survey.unreadable
        and not ("" in survey.weight_map and survey.unreadable)
    ]
    told = {problem.tensor for problem in survey.problems}
    twice = [one for one in found.twice if one.tensor not in told]
    for problems in (twice, found.wrong, missing, found.extra, found.hints):
        findings.take("tensors", problems)
    if not found.missing:
        findings.take("tensors", found.storage, "warning")
    if findings.count("error", "tensors") or findings.count("error", "files"):
        return None
    source = Checkpoint(folder, config, survey.shards, "mmap")
    try:
        if not quick:
            _check_decays(source, findings)
        return source.summary()
    finally:
        source.close()


def _check_decays(source: Checkpoint, findings: Findings) -> None:
    """A_log as the loader takes it: one value per head, then zeros."""
    for name in source.names_for_attention():
        if name.endswith(".A_log"):
            try:
                source.tensor(name)
            except CheckpointError as error:
                findings.take("values", [error.problem])


def _files(folder: Path, apart: frozenset[Path], listed: Iterable[str]) -> dict[str, Path]:
    """All files by their name below `folder`. Hidden ones (.git, .cache) are no part of a model,
    unless they are `listed` (.gitattributes)."""
    found = {}
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder)
        hidden = any(part.startswith(".") for part in name.parts)
        if not hidden and path.is_file() and path.resolve() not in apart:
            found[name.as_posix()] = path
    return found | {name: folder / name for name in listed if (folder / name).is_file()}


def _pointers(files: Mapping[str, Path]) -> Iterator[Problem]:
    """Small files that were not fetched either; reading a shard's header tells of shards."""
    for name, path in files.items():
        if name.endswith(".safetensors"):
            continue
        try:
            if is_lfs_pointer(path):
                text = f"{name}: a Git LFS pointer, not the file; fetch it first"
                yield Problem(text, name, "", "the file", "a Git LFS pointer")
        except OSError as error:
            yield Problem(f"{name}: cannot be read ({error.strerror})", name)


class _Reader:
    """Reads every file once, several at a time."""

    def __init__(self, folder: Path, shards: list[Shard], findings: Findings) -> None:
        self._folder, self._findings = folder, findings
        self._shards = {shard.path.name: shard for shard in shards}
        self.digests: dict[str, tuple[int, dict[str, str]]] = {}
        self.bytes_read = 0

    def read(self, wanted: Mapping[str, list[str]], threads: int, progress: bool) -> None:
        """wanted: file -> algorithms. Files without one are read only if they are shards."""
        names = [name for name, kinds in wanted.items() if kinds or name in self._shards]
        sizes = {name: (self._folder / name).stat().st_size for name in names}
        shown = _progress() if progress else None
        with shown if shown is not None else nullcontext():
            task = shown.add_task("reading", total=sum(sizes.values())) if shown else None

            def count(size: int) -> None:
                if shown is not None and task is not None:
                    shown.advance(task, size)

            # The largest first, or one thread ends long after the others.
            names.sort(key=lambda name: -sizes[name])
            with ThreadPoolExecutor(threads) as pool:
                list(pool.map(lambda name: self._read(name, wanted[name], count), names))
        self.bytes_read = sum(sizes.values())

    def _read(self, name: str, kinds: list[str], count: Count) -> None:
        path, shard = self._folder / name, self._shards.get(name)
        try:
            size = path.stat().st_size
            hashers = {kind: new_hasher(kind, size) for kind in kinds}
            if shard is None:
                size = read_plain(path, list(hashers.values()), count)
            else:
                read_shard_values(shard, list(hashers.values()), count, self._findings)
        except OSError as error:
            text = f"{name}: cannot be read ({error.strerror or error})"
            self._findings.take("files", [Problem(text, name)])
            return
        if hashers:
            self.digests[name] = size, {kind: one.hexdigest() for kind, one in hashers.items()}


class _Manifest:
    """Folder against manifest."""

    def __init__(self, listed: Mapping[str, Listed], findings: Findings) -> None:
        self._listed, self._findings = listed, findings
        self._fits: set[str] = set()

    def compare_names(self, files: Mapping[str, Path]) -> None:
        """Which files there are, and their sizes."""
        for name, one in self._listed.items():
            if name not in files:
                # Who fetches a model may leave its pictures and papers behind.
                severity: Severity = "error" if name.endswith(_PARTS) else "warning"
                text = "listed in the manifest, not there"
                self._differs(name, text, "a file", "nothing", severity)
                continue
            size = files[name].stat().st_size
            if one.size is not None and one.size != size:
                text = f"{size} bytes, the manifest says {one.size}"
                self._differs(name, text, f"{one.size} bytes", f"{size} bytes")
            else:
                self._fits.add(name)
        for name in sorted(set(files) - set(self._listed)):
            if name.endswith(_PARTS):
                text = f"{name}: not listed in the manifest"
                self._findings.add(
                    Finding("warning", "manifest", text, name, "", "listed", "not listed")
                )

    def ask(self, wanted: dict[str, list[str]]) -> None:
        """Adds the algorithms that the manifest uses; a file of another size differs already."""
        for name in self._fits:
            digest = self._listed[name].digest
            if digest is not None and digest.algorithm not in wanted[name]:
                wanted[name].append(digest.algorithm)

    def compare_digests(self, digests: Mapping[str, tuple[int, dict[str, str]]]) -> None:
        for name in sorted(self._fits & digests.keys()):
            digest = self._listed[name].digest
            if digest is None:
                continue
            found = digests[name][1][digest.algorithm]
            if found != digest.value:
                text = f"{digest.algorithm} {found}, the manifest says {digest.value}"
                self._differs(name, text, digest.value, found)

    def _differs(
        self, name: str, text: str, expected: str, found: str, severity: Severity = "error"
    ) -> None:
        text = f"{name}: {text}"
        self._findings.add(Finding(severity, "manifest", text, name, "", expected, found))


def _progress() -> Progress:
    return Progress(
        BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn(),
        console=Console(stderr=True), transient=True,
    )  # fmt: skip
