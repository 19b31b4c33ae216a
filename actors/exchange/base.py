"""What the model knows of the expert tier: dispatch rows, go on working, combine partial sums."""

from typing import Any, Protocol

import torch
from torch import Tensor


class ExchangeError(RuntimeError):
    """A step of the exchange failed. Names who, where and when: a stall is never a riddle."""

    def __init__(self, rank: int, layer: int, phase: str, step: int, reason: str) -> None:
        super().__init__(f"rank {rank}, layer {layer}, {phase}, step {step}: {reason}")
        self.rank, self.layer, self.phase, self.step, self.reason = rank, layer, phase, step, reason

    def __reduce__(self) -> tuple[Any, ...]:
        """Between processes an exception is made again from its arguments, by default its text."""
        return type(self), (self.rank, self.layer, self.phase, self.step, self.reason)


class MisuseError(ExchangeError):
    """The caller and the exchange disagree on the step: it would fail in any epoch."""


class Exchange(Protocol):
    """One step is begin_step, then per MoE layer dispatch and combine, then end_step.

    Between dispatch and combine the caller may compute (shared experts, another micro-batch).
    """

    def begin_step(self, rows: int, micros: int = 1) -> None:
        """rows: at most so many in any one dispatch. micros: micro-batches in flight."""
        ...

    def dispatch(
        self, layer: int, z_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor, micro: int = 0
    ) -> Any:
        """Send each row to the actors that hold its experts.

        layer: absolute layer number. z_TD: latents. ids_TK: global expert ids, int64.
        weights_TK: fp32. Returns a handle for combine; until then the three stay as they are.
        """
        ...

    def combine(self, pending: Any) -> Tensor:
        """The weighted sum over all chosen experts, fp32 [T, D]. Raises ExchangeError."""
        ...

    def end_step(self) -> None: ...


class PartialSums(Protocol):
    """The part of an expert bank that an exchange needs."""

    def local_ids(self, layer: int, ids_TK: Tensor) -> Tensor:
        """The ids of experts held here, -1 for all others; -1 stays -1."""
        ...

    def partial_sum(self, layer: int, z_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor) -> Tensor:
        """The weighted sum over the experts of each row, -1 for none: float64 [T, D] where the
        bank computes in float32, else float32. Raises LookupError for one not held here."""
        ...


class LocalExchange:
    """All experts in this process: the readable twin of the mesh exchange and its test oracle.

    With several banks each choice is computed by the first one that holds its expert.
    """

    def __init__(self, *banks: PartialSums) -> None:
        self._banks = banks

    def begin_step(self, rows: int, micros: int = 1) -> None:
        pass

    def dispatch(
        self, layer: int, z_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor, micro: int = 0
    ) -> Tensor:
        total: Tensor | None = None
        for bank in self._banks:
            mine_TK = bank.local_ids(layer, ids_TK)
            part = bank.partial_sum(layer, z_TD, mine_TK, weights_TK)
            total = part if total is None else total.add_(part)
            if len(self._banks) > 1:
                ids_TK = ids_TK.masked_fill(mine_TK >= 0, -1)
        if total is None:
            return torch.zeros(z_TD.shape, dtype=torch.float32, device=z_TD.device)
        return total.float()

    def combine(self, pending: Tensor) -> Tensor:
        return pending

    def end_step(self) -> None:
        pass
