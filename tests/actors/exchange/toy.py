"""A mesh of toy experts: ranks as threads of one process, or as processes where one must die."""

import itertools
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from expertmesh.actors.exchange.base import LocalExchange
from expertmesh.actors.exchange.mesh import MeshExchange
from expertmesh.actors.exchange.process_group import open_store
from expertmesh.actors.exchange.roster import Roster
from expertmesh.actors.exchange.serve import MeshServer
from expertmesh.actors.exchange.settings import ExchangeSettings
from expertmesh.kernels.registry import Kernels

HOST = "127.0.0.1"
Rows = tuple[Tensor, Tensor, Tensor]


class ToyBank:
    """Expert e of layer l: w * tanh(z * a + b). Elementwise, so a row's bits are its own."""

    def __init__(self, held: Mapping[int, Iterable[int]], num_experts: int, width: int) -> None:
        generator = torch.Generator().manual_seed(7)
        self._a = torch.randn(max(held) + 1, num_experts, width, generator=generator)
        self._b = torch.randn(max(held) + 1, num_experts, 1, generator=generator)
        self._holds = torch.zeros(max(held) + 1, num_experts, dtype=torch.bool)
        for layer, experts in held.items():
            self._holds[layer, list(experts)] = True
        self.seen: list[tuple[int, int]] = []

    def hold(self, layer: int, experts: Iterable[int]) -> None:
        """Besides those it has."""
        self._holds[layer, list(experts)] = True

    def keep(self, layer: int, experts: Iterable[int]) -> None:
        """No others."""
        dropped = set(range(self._holds.shape[1])) - set(experts)
        self._holds[layer, list(dropped)] = False

    def local_ids(self, layer: int, ids_TK: Tensor) -> Tensor:
        held_TK = self._holds[layer, ids_TK.clamp(min=0)] & (ids_TK >= 0)
        return ids_TK.where(held_TK, -1)

    def partial_sum(self, layer: int, z_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor) -> Tensor:
        assert z_TD.shape[0] == ids_TK.shape[0] == weights_TK.shape[0]
        if not torch.equal(self.local_ids(layer, ids_TK), ids_TK):
            raise LookupError(f"layer {layer}: an expert of {ids_TK.unique().tolist()} is missing")
        self.seen.append((layer, z_TD.shape[0]))
        e_TK = ids_TK.clamp(min=0)
        out_TKD = torch.tanh(z_TD.float()[:, None] * self._a[layer, e_TK] + self._b[layer, e_TK])
        terms_TKD = torch.where((ids_TK >= 0)[..., None], out_TKD * weights_TK[..., None], 0.0)
        return terms_TKD.sum(1, dtype=torch.float64)


def contiguous(layers: Sequence[int], num_experts: int, actors: int) -> dict[int, list[list[int]]]:
    cuts = [num_experts * a // actors for a in range(actors + 1)]
    held = [list(range(begin, end)) for begin, end in itertools.pairwise(cuts)]
    return dict.fromkeys(layers, held)


@dataclass
class Shape:
    attention: int = 1
    experts: int = 2
    layers: tuple[int, ...] = (1, 2, 4)
    num_experts: int = 7
    width: int = 12
    top_k: int = 3
    placed: dict[int, list[list[int]]] | None = None
    settings: ExchangeSettings = field(
        default_factory=lambda: ExchangeSettings(deadline_s=5.0, max_rows=64)
    )
    kernels: Kernels | None = None

    def roster(self, store: tuple[str, int], epoch: int = 3) -> Roster:
        placed = self.placed or contiguous(self.layers, self.num_experts, self.experts)
        return Roster(epoch, self.attention, self.experts, placed, store)

    def attention_rank(
        self, roster: Roster, rank: int, on_wake: Callable[[], None] | None = None
    ) -> MeshExchange:
        return MeshExchange(
            roster, rank, self.settings, width=self.width, top_k=self.top_k,
            num_experts=self.num_experts, host=HOST, on_wake=on_wake, kernels=self.kernels,
        )  # fmt: skip

    def bank(self, roster: Roster, actor: int) -> ToyBank:
        held = {layer: held[actor] for layer, held in roster.placed.items()}
        return ToyBank(held, self.num_experts, self.width)

    def expert_rank(self, roster: Roster, actor: int, bank: ToyBank | None = None) -> MeshServer:
        return MeshServer(
            roster, roster.attention + actor, self.settings, bank or self.bank(roster, actor),
            width=self.width, top_k=self.top_k, dtype=torch.float32, host=HOST,
            kernels=self.kernels,
        )  # fmt: skip

    def oracle(self, roster: Roster) -> LocalExchange:
        everything = dict.fromkeys(roster.layers, range(self.num_experts))
        return LocalExchange(ToyBank(everything, self.num_experts, self.width))

    def rows(self, count: int, seed: int = 0, among: Sequence[int] | None = None) -> Rows:
        """Random latents, distinct expert ids per row, router weights."""
        generator = torch.Generator().manual_seed(seed)
        pool = torch.tensor(list(among or range(self.num_experts)))
        scores = torch.rand(count, len(pool), generator=generator)
        ids_TK = pool[scores.argsort(1)[:, : self.top_k]]
        z_TD = torch.randn(count, self.width, generator=generator)
        return z_TD, ids_TK, torch.rand(count, self.top_k, generator=generator)


class ThreadMesh:
    """All ranks of an epoch in this process. `run` gives every attention rank a function."""

    def __init__(self, shape: Shape) -> None:
        self.shape = shape
        self._store, address = open_store(HOST)
        self.roster = shape.roster(address)
        self.exchanges: list[MeshExchange] = []
        self.servers: list[MeshServer] = []
        self.banks = [shape.bank(self.roster, actor) for actor in range(shape.experts)]
        self.server_errors: list[BaseException | None] = [None] * shape.experts
        made: dict[int, MeshExchange | MeshServer] = {}

        def join(rank: int) -> None:
            if rank < shape.attention:
                made[rank] = shape.attention_rank(self.roster, rank)
            else:
                actor = rank - shape.attention
                made[rank] = shape.expert_rank(self.roster, actor, self.banks[actor])

        in_threads([lambda rank=rank: join(rank) for rank in range(self.roster.size)])
        self.exchanges = [made[r] for r in range(shape.attention)]  # type: ignore[misc]
        self.servers = [made[r] for r in range(shape.attention, self.roster.size)]  # type: ignore[misc]
        self._threads = [
            threading.Thread(target=self._serve, args=(actor,), daemon=True)
            for actor in range(shape.experts)
        ]
        for thread in self._threads:
            thread.start()

    def _serve(self, actor: int) -> None:
        try:
            self.servers[actor].run()
        except BaseException as error:
            self.server_errors[actor] = error

    def __enter__(self) -> "ThreadMesh":
        return self

    def __exit__(self, *_: object) -> None:
        for exchange in self.exchanges:
            exchange.close()
        self.join()

    def join(self) -> None:
        for thread in self._threads:
            thread.join(10)
            assert not thread.is_alive(), "an expert rank did not end"


def in_threads(work: Sequence[Callable[[], Any]]) -> list[Any]:
    """Runs all at once; the first exception is raised after all have ended."""
    results: list[Any] = [None] * len(work)
    errors: list[BaseException] = []

    def run(index: int) -> None:
        try:
            results[index] = work[index]()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(i,), daemon=True) for i in range(len(work))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
        assert not thread.is_alive(), "hangs"
    if errors:
        raise errors[0]
    return results
