"""Recorded traffic: what `expertmesh routing record` writes and the grouping of experts reads.

An .npz file (np.load without pickle) with these arrays; L MoE layers, E experts, A expert actors,
K experts per token, N recorded tokens:

    format   str ()           "expertmesh-routing-1"
    model    str ()           name of the served model
    layers   int64 [L]        absolute layer numbers
    experts  int64 ()         E
    top_k    int64 ()         K
    seconds  float64 ()       how long was recorded
    hits     int64 [L, E]     of every row in that time, recorded tokens or not
    tokens   int64 [L]        rows that were routed
    trace    int16 [N, L, K]  expert ids of whole tokens, in the order of the router
    holds    bool [L, A, E]   the placement at the end; A = 0 without an expert tier
"""

import io
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO
from zipfile import BadZipFile

import numpy as np

from expertmesh.actors.exchange.counting import RoutingSnapshot, Trace
from expertmesh.actors.exchange.replicas import ReplicaChoice
from expertmesh.cluster.ledger.coactivation import coactivation, top_pairs
from expertmesh.cluster.ledger.report import Report, layer_reports
from expertmesh.cluster.placement import Placement

FORMAT = "expertmesh-routing-1"
# Tokens that choose their actors at once when a recording is replayed: a decode step's worth.
STEP_TOKENS = 64


class RecordingError(ValueError):
    """Not a recording, or a damaged one. The message names the file and the fault."""


@dataclass(frozen=True, slots=True)
class Recording:
    """The arrays of the file. hits_LE int64, trace_NLK int16, holds_LAE bool."""

    layers: tuple[int, ...]
    experts: int
    top_k: int
    seconds: float
    hits_LE: np.ndarray
    trace_NLK: np.ndarray
    holds_LAE: np.ndarray
    model: str = ""

    @property
    def placement(self) -> Placement | None:
        if self.holds_LAE.shape[1] == 0:
            return None
        return Placement(
            {
                layer: tuple(tuple(np.flatnonzero(held_E).tolist()) for held_E in held_AE)
                for layer, held_AE in zip(self.layers, self.holds_LAE, strict=True)
            }
        )

    def write(self, file: BinaryIO) -> None:
        np.savez_compressed(
            file,
            format=np.array(FORMAT),
            model=np.array(self.model),
            layers=np.array(self.layers, np.int64),
            experts=np.int64(self.experts),
            top_k=np.int64(self.top_k),
            seconds=np.float64(self.seconds),
            hits=self.hits_LE.astype(np.int64),
            tokens=self.hits_LE.sum(1) // self.top_k,
            trace=self.trace_NLK.astype(np.int16),
            holds=self.holds_LAE.astype(bool),
        )

    def to_bytes(self) -> bytes:
        file = io.BytesIO()
        self.write(file)
        return file.getvalue()

    def report(self, pairs: int = 10) -> Report:
        """pairs: per layer, at most."""
        found = [
            top_pairs(self.coactivation(i), len(self.trace_NLK), pairs)
            for i in range(len(self.layers))
        ]
        return Report(
            model=self.model,
            experts=self.experts,
            top_k=self.top_k,
            windows=0,
            half_life=0.0,
            fan_out=self.fan_out(),
            layers=layer_reports(self.layers, self.hits_LE, self.placement, pairs=found),
        )

    def coactivation(self, index: int) -> np.ndarray:
        """int64 [E, E] of the layer at this index, see coactivation.coactivation."""
        return coactivation(self.trace_NLK[:, index], self.experts)

    def fan_out(self) -> float | None:
        """Distinct expert actors per token and layer, replayed on the placement in the file."""
        tokens, layers = len(self.trace_NLK), len(self.layers)
        if not tokens or self.holds_LAE.shape[1] == 0:
            return None
        distinct: int = 0
        for index in range(layers):
            choice = ReplicaChoice(self.holds_LAE[index])
            for begin in range(0, tokens, STEP_TOKENS):
                ids_TK = self.trace_NLK[begin : begin + STEP_TOKENS, index].astype(np.int64)
                actors_TK = np.sort(choice.assign(ids_TK), axis=1)
                distinct += len(ids_TK) + int((np.diff(actors_TK, axis=1) > 0).sum())
        return distinct / (tokens * layers)


def holds_of(placement: Placement | None, layers: Sequence[int], experts: int) -> np.ndarray:
    """bool [L, A, E] of a placement; A = 0 without one."""
    actors = 0 if placement is None else placement.actors
    holds_LAE = np.zeros((len(layers), actors, experts), bool)
    if placement is not None:
        for i, layer in enumerate(layers):
            for actor, held in enumerate(placement.held[layer]):
                holds_LAE[i, actor, list(held)] = True
    return holds_LAE


def assemble(
    before: Sequence[RoutingSnapshot],
    after: Sequence[RoutingSnapshot],
    traces: Sequence[Trace],
    placement: Placement | None,
    seconds: float,
    *,
    tokens: int | None = None,
    model: str = "",
) -> Recording:
    """One recording of what all attention replicas have seen.

    before, after: snapshots at the two ends, in any order; a replica that came in between counts
    from its start, one that left does not count. tokens: at most so many in the trace.
    """
    last = after[0]
    begun = {one.source: one.hits_LE() for one in before}
    hits_LE = np.zeros((len(last.layers), last.experts), np.int64)
    for one in after:
        hits_LE += one.hits_LE()
        if one.source in begun:
            hits_LE -= begun[one.source]
    trace_NLK = np.concatenate(
        [np.zeros((0, len(last.layers), last.top_k), np.int16), *[one.ids_NLK() for one in traces]]
    )
    return Recording(
        last.layers,
        last.experts,
        last.top_k,
        seconds,
        hits_LE,
        trace_NLK[:tokens],
        holds_of(placement, last.layers, last.experts),
        model,
    )


def load_recording(source: Path | BinaryIO) -> Recording:
    """Raises RecordingError, and OSError when the file cannot be read."""
    name = str(source) if isinstance(source, Path) else "the recording"
    try:
        with np.load(source, allow_pickle=False) as arrays:
            if str(arrays["format"]) != FORMAT:
                raise RecordingError(f"{name}: format {arrays['format']!s}, not {FORMAT}")
            recording = Recording(
                tuple(arrays["layers"].tolist()),
                int(arrays["experts"]),
                int(arrays["top_k"]),
                float(arrays["seconds"]),
                arrays["hits"],
                arrays["trace"],
                arrays["holds"],
                str(arrays["model"]),
            )
    except RecordingError:
        raise
    except (KeyError, ValueError, BadZipFile, EOFError, TypeError, AttributeError) as error:
        raise RecordingError(f"{name} is not a routing recording: {error}") from error
    _check(name, recording)
    return recording


def load_recording_of(file: Path, layers: Sequence[int], experts: int) -> Recording:
    """A recording of a model with these MoE layers and experts per layer. Raises RecordingError for
    one of another model, and what load_recording raises."""
    recording = load_recording(file)
    if (recording.layers, recording.experts) != (tuple(layers), experts):
        raise RecordingError(
            f"{file}: of a model with {recording.experts} experts in {len(recording.layers)} "
            f"layers, this one has {experts} in {len(layers)}"
        )
    return recording


def _check(name: str, recording: Recording) -> None:
    size, trace = len(recording.layers), recording.trace_NLK
    if recording.hits_LE.shape != (size, recording.experts):
        raise RecordingError(f"{name}: hits of shape {recording.hits_LE.shape}")
    if trace.ndim != 3 or trace.shape[1:] != (size, recording.top_k):
        raise RecordingError(f"{name}: a trace of shape {trace.shape}")
    holds = recording.holds_LAE.shape
    if len(holds) != 3 or (holds[0], holds[2]) != (size, recording.experts):
        raise RecordingError(f"{name}: a placement of shape {holds}")
    if trace.size and not 0 <= trace.min() <= trace.max() < recording.experts:
        raise RecordingError(f"{name}: expert ids {trace.min()} to {trace.max()}")
