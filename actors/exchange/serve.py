"""The expert end of the exchange: rows of all attention ranks in, one grouped GEMM, sums out."""

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from expertmesh.actors.exchange.base import PartialSums
from expertmesh.actors.exchange.control import ExpertControl, StepPlan
from expertmesh.actors.exchange.direct import DirectExpert
from expertmesh.actors.exchange.layouts import ExactExpert, ExpertEnd, PaddedExpert
from expertmesh.actors.exchange.mesh import formats_of, layout_of
from expertmesh.actors.exchange.process_group import Groups, Where
from expertmesh.actors.exchange.roster import Roster
from expertmesh.actors.exchange.settings import ExchangeSettings
from expertmesh.actors.exchange.wire import Frame, Round, from_float8
from expertmesh.actors.process import yield_to_sender


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
    ) -> None:
        """Meets the other ranks; raises ExchangeError. dtype: what the bank computes in."""
        self.device = torch.device(device)
        self.roster, self.rank = roster, rank
        self._bank, self._dtype = bank, dtype
        self._max_rows = settings.max_rows
        self._groups = Groups(roster, rank, settings, self.device, host)
        formats = formats_of(settings, width, top_k, self.device)
        layout, hear = layout_of(settings, self.device), None
        self._end: ExpertEnd
        if layout == "direct":
            self._end = direct = DirectExpert(self._groups, formats, settings.max_rows, host)
            hear = direct.hear
        else:
            end = PaddedExpert if layout == "padded" else ExactExpert
            self._end = end(self._groups, formats, settings.max_rows)
        self._control = ExpertControl(self._groups, hear)
        self.work = {layer: LayerWork() for layer in roster.layers}
        self.steps = 0

    @torch.inference_mode()
    def run(self, on_step: Callable[[], None] | None = None) -> None:
        """Serves steps until the epoch ends. Raises ExchangeError; any failure ends the epoch.

        A failure of the bank closes the group too: the attention side gets an error at once
        where it would otherwise wait for its deadline.
        """
        yield_to_sender()
        try:
            while (plan := self._control.next_step(self._max_rows)) is not None:
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

    def _serve(self, at: Round, plan: StepPlan) -> None:
        arrived = self._end.receive(at, plan.capacity)
        counts = [self._checked(frame, at, peer) for peer, frame in enumerate(arrived)]
        began = time.perf_counter()
        total = sum(counts)
        sums: Tensor | None = None
        if total:
            z_TD, slots_TK, weights_TK = self._merged(arrived, counts)
            sums = self._bank.partial_sum(at.layer, z_TD, slots_TK, weights_TK)
        replies = self._end.outgoing(at, plan.capacity)
        begin = 0
        for frame, count in zip(replies, counts, strict=True):
            frame.write_header(at, count)
            if count and sums is not None:
                frame.views(count)[0].copy_(sums[begin : begin + count])
            begin += count
        if total:  # before the reply: who has an answer finds it counted
            work = self.work[at.layer]
            work.rows += total
            work.calls += 1
            work.busy_s += time.perf_counter() - began
        self._end.send(at, plan.capacity, counts)

    def _checked(self, frame: Frame, at: Round, peer: int) -> int:
        wrong = frame.mismatch(at)
        if wrong is not None:
            self._groups.close()
            raise Where(peer, at.layer, "dispatch", at.step).error(wrong)
        return frame.rows

    def _merged(self, frames: list[Frame], counts: list[int]) -> tuple[Tensor, Tensor, Tensor]:
        """All rows as (z [N, D], slots int64 [N, K], weights [N, K]), ranks in order."""
        parts = [frame.views(n) for frame, n in zip(frames, counts, strict=True) if n]
        merged = parts[0] if len(parts) == 1 else tuple(map(torch.cat, zip(*parts, strict=True)))
        z_TD, slots_TK, weights_TK = merged[:3]
        if len(merged) == 4:
            z_TD = from_float8(z_TD, merged[3], self._dtype)
        elif z_TD.dtype != self._dtype:
            z_TD = z_TD.to(self._dtype)
        return z_TD, slots_TK.long(), weights_TK
