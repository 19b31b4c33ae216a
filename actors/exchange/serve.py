"""The expert end of the exchange: rows of all attention ranks in, one grouped GEMM, sums out."""

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from expertmesh.actors.exchange.base import ExchangeError, PartialSums
from expertmesh.actors.exchange.control import ExpertControl, Listeners
from expertmesh.actors.exchange.counted import CountedExpert
from expertmesh.actors.exchange.direct import DirectExpert
from expertmesh.actors.exchange.formats import Formats, agree, formats_of
from expertmesh.actors.exchange.layouts import ExactExpert, ExpertEnd, PaddedExpert
from expertmesh.actors.exchange.opening import Opening, StepPlan
from expertmesh.actors.exchange.process_group import Groups, Where
from expertmesh.actors.exchange.roster import Roster
from expertmesh.actors.exchange.settings import ExchangeSettings
from expertmesh.actors.exchange.whole import WholeExpert, is_few
from expertmesh.actors.exchange.wire import Frame, Round, read_headers, write_headers
from expertmesh.actors.model.upload import uploads_for
from expertmesh.actors.process import yield_to_sender
from expertmesh.kernels.registry import Kernels, load_kernels

ENDS: dict[str, Callable[[Groups, Formats], ExpertEnd]] = {
    "exact": ExactExpert,
    "padded": PaddedExpert,
    "mixed": CountedExpert,
}


@dataclass(slots=True)
class LayerWork:
    """What one layer has cost so far. rows: rows received that really carry a token."""

    rows: int = 0
    calls: int = 0
    busy_s: float = 0.0


class MeshServer:
    """Serves one epoch from one thread: `run` returns when the attention side leaves."""

    def __init__(
        self,
        roster: Roster,
        rank: int,
        settings: ExchangeSettings,
        bank: PartialSums,
        *,
        width: int,
        top_k: int,
        dtype: torch.dtype,
        host: str,
        device: torch.device | str = "cpu",
        kernels: Kernels | None = None,
    ) -> None:
        """Meets the other ranks; raises ExchangeError. dtype: what the bank computes in. kernels:
        who decodes float8 latents; by default what "auto" takes."""
        self.device = torch.device(device)
        self._fp8_decode = (kernels or load_kernels(device_type=self.device.type)).fp8_decode
        self.roster, self.rank = roster, rank
        self._bank, self._dtype = bank, dtype
        self._max_rows = settings.max_rows
        self._groups = groups = Groups(roster, rank, settings, self.device, host)
        formats = formats_of(settings, width, top_k, dtype, self.device)
        agree(groups, formats)
        self._end: ExpertEnd
        if formats.layout == "direct":
            self._end = direct = DirectExpert(groups, formats, host)
            collect = direct.collect
        else:
            self._end = ENDS[formats.layout](groups, formats)
            listeners = Listeners(groups, range(roster.attention))

            def collect(step: int) -> list[Opening]:
                return listeners.collect(step, parked=True)

        self._whole: WholeExpert | None = None
        if formats.layout == "mixed":
            self._whole = WholeExpert(groups, formats, uploads_for(self.device))
        self._control = ExpertControl(groups, collect)
        groups.met()
        self.work = {layer: LayerWork() for layer in roster.layers}
        self.steps = 0
        # Of an older routing version experts may have been dropped. Set from any thread.
        self.version_floor = roster.version

    @torch.inference_mode()
    def run(self, on_step: Callable[[], None] | None = None) -> None:
        """Serves steps until the epoch ends. Raises ExchangeError; any failure ends the epoch.

        A failure of the bank closes the group too: the attention side gets an error at once
        where it would otherwise wait for its deadline.
        """
        yield_to_sender()
        try:
            while (plan := self._control.next_step(self._max_rows)) is not None:
                self._check_version(plan)
                if self._whole is not None and is_few(plan):
                    self._serve_whole(self._whole, plan)
                else:
                    for at in plan.rounds(self.roster.layers):
                        self._serve(at, plan)
                self.steps += 1
                if on_step is not None:
                    on_step()
        finally:
            self._groups.close()

    def close(self) -> None:
        """Ends the epoch here, from any thread; `run` then raises ExchangeError."""
        self._groups.close()

    def _check_version(self, plan: StepPlan) -> None:
        if plan.version < self.version_floor:
            reason = (
                f"the step uses routing version {plan.version}, here experts of versions before "
                f"{self.version_floor} have been dropped"
            )
            raise ExchangeError(self.rank, -1, "open", plan.step, reason)

    def _serve(self, at: Round, plan: StepPlan) -> None:
        arrived = self._end.receive(at, plan.capacity)
        counts = self._checked(arrived, at)
        began = time.perf_counter()
        total = sum(counts)
        sums = self._sums(at, arrived, counts) if total else None
        replies = self._end.outgoing(at, plan.capacity)
        write_headers(replies, at, counts)
        begin = 0
        for frame, count in zip(replies, counts, strict=True):
            if count and sums is not None:
                frame.views(count)[0].copy_(sums[begin : begin + count])
            begin += count
        if total:  # before the reply: who has an answer finds it counted
            work = self.work[at.layer]
            work.rows += total
            work.calls += 1
            work.busy_s += time.perf_counter() - began
        self._end.send(at, plan.capacity, counts)

    def _serve_whole(self, whole: WholeExpert, plan: StepPlan) -> None:
        """A step in which only the device knows what came."""
        whole.begin(plan, self.roster.layers)
        for at in plan.rounds(self.roster.layers):
            rows = self._decoded(whole.receive(at, plan.capacity))
            whole.send(at, plan.capacity, self._partial_sum(at, *rows))
        for layer, count, seconds in whole.finish():
            if count:
                work = self.work[layer]
                work.rows += count
                work.calls += 1
                work.busy_s += seconds

    def _sums(self, at: Round, arrived: list[Frame], counts: list[int]) -> Tensor:
        return self._partial_sum(at, *self._merged(arrived, counts))

    def _partial_sum(self, at: Round, z_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor) -> Tensor:
        try:
            return self._bank.partial_sum(at.layer, z_TD, ids_TK, weights_TK)
        except LookupError as error:  # an expert that is not held here
            reason = str(error)
            raise ExchangeError(self.rank, at.layer, "experts", at.step, reason) from error

    def _checked(self, frames: list[Frame], at: Round) -> list[int]:
        """The rows of each rank's message. Raises ExchangeError."""
        headers = read_headers(frames)
        for peer, (frame, header) in enumerate(zip(frames, headers, strict=True)):
            wrong = frame.mismatch(header, at)
            if wrong is not None:
                self._groups.close()
                raise Where(peer, at.layer, "dispatch", at.step).error(wrong)
        return [header.rows for header in headers]

    def _merged(self, frames: list[Frame], counts: list[int]) -> tuple[Tensor, Tensor, Tensor]:
        """All rows as (z [N, D], ids int64 [N, K], weights [N, K]), ranks in order."""
        parts = [frame.views(n) for frame, n in zip(frames, counts, strict=True) if n]
        merged = parts[0] if len(parts) == 1 else tuple(map(torch.cat, zip(*parts, strict=True)))
        return self._decoded(merged)

    def _decoded(self, sections: tuple[Tensor, ...]) -> tuple[Tensor, Tensor, Tensor]:
        z_TD, ids_TK, weights_TK, *scale = sections
        if scale:
            z_TD = self._fp8_decode(z_TD, scale[0], self._dtype)
        elif z_TD.dtype != self._dtype:
            z_TD = z_TD.to(self._dtype)
        return z_TD, ids_TK.long(), weights_TK
