"""Which copy of an expert serves which token, decided per step and layer.

Every attention rank splits its own rows: no counts are exchanged, and the sum of balanced splits
is balanced. All of it is integer arithmetic on the ids and the placement, so that any rank that
looks at the same rows and the same placement finds the same answer.
"""

import numpy as np
from numpy.typing import NDArray

from expertmesh.actors.exchange.replica_deal import Dealer
from expertmesh.actors.exchange.replica_graph import replica_graph
from expertmesh.actors.exchange.replica_split import split


class ReplicaChoice:
    """The copies of one layer under one routing version. Immutable, so any thread may ask.

    P expert actors, E experts, T rows, K experts per token. Experts with the same holders are one
    set, G in all.
    """

    def __init__(self, holds_PE: NDArray[np.bool_], few: int = 32) -> None:
        """holds_PE: actor p has a copy of expert e. Raises ValueError for an expert without one.

        few: steps of at most so many rows are not balanced but keep each token on few actors.
        """
        self.graph, self._few = replica_graph(holds_PE), few
        self._dealer = Dealer(self.graph)

    def assign(self, ids_TK: NDArray[np.int64]) -> NDArray[np.int32]:
        """int32 [T, K]: the actor that serves each choice, always a holder of the expert.

        The most loaded actor gets as few choices as any split allows, unless the rows are few.
        """
        graph = self.graph
        if not graph.holders:
            return graph.code_E[ids_TK]
        if len(ids_TK) <= self._few:
            return self._dealer.by_order(ids_TK)
        code_TK = graph.code_E.take(ids_TK)  # in C order, whatever the order of the ids
        counts = np.bincount(code_TK.reshape(-1), minlength=graph.actors + len(graph.holders))
        served, _ = split(graph, counts)
        return self._dealer.deal(code_TK, served)

    @property
    def orders_RE(self) -> NDArray[np.int32]:
        """The table behind the choice for few rows: row t of a step takes the actors of line
        (first id of the step + t) mod R."""
        return self._dealer.orders_RE

    def split(self, counts_E: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Choices by expert -> choices of each set that each actor serves [P, G], and its load [P].

        The largest load is the least possible one in whole choices.
        """
        graph = self.graph
        counts = np.zeros(graph.actors + len(graph.holders), np.int64)
        np.add.at(counts, graph.code_E, counts_E)
        served, load = split(graph, counts)
        served_PG = np.zeros((graph.actors, len(graph.holders)), np.int64)
        served_PG[graph.actor, graph.set_C] = served
        return served_PG, np.array(load)
