"""Which tokens go to which copy, once it is known how many each copy serves.

T rows, K experts per token, P actors, E experts, G sets with at most M holders, R orders in which
tokens prefer actors, N choices that are still open.
"""

import numpy as np
from numpy.typing import NDArray

from expertmesh.actors.exchange.replica_graph import ReplicaGraph

STARTS = 8  # orders begin at so many actors at most, and go up or down from there


class Dealer:
    """The copies of one layer as tables. Immutable."""

    def __init__(self, graph: ReplicaGraph) -> None:
        sizes = [len(members) for members in graph.holders]
        self._graph, self._most = graph, max(sizes, default=1)
        self._sets = np.arange(len(sizes))
        # numpy sorts 16-bit keys by radix, several times as fast
        self._key = np.int16 if 8 * len(sizes) < 1 << 15 else np.int32
        self._nth_C = np.array([nth for size in sizes for nth in range(size)], np.int64)
        self._holder_GM = np.array(  # the last holder fills up
            [members + members[-1:] * (self._most - len(members)) for members in graph.holders],
            np.int64,
        ).reshape(-1, self._most)
        self._holder_MG = np.ascontiguousarray(self._holder_GM.T)
        orders_RP = _orders(graph.actors)
        rank_RGM = np.argsort(orders_RP, axis=1)[:, self._holder_GM]
        least_RGM = np.minimum.accumulate(rank_RGM[..., ::-1], axis=2)[..., ::-1]
        prefers_MRG = np.moveaxis(rank_RGM == least_RGM, 2, 0).astype(np.int8)
        self._prefers_MX = prefers_MRG.reshape(self._most, -1)
        first_RG = self._holder_GM[self._sets, rank_RGM.argmin(2)]
        plain_RP = np.tile(np.arange(graph.actors), (len(orders_RP), 1))
        preferred_RC = np.concatenate([plain_RP, first_RG], axis=1).astype(np.int32)
        self.orders_RE = preferred_RC[:, graph.code_E]

    def by_order(self, ids_TK: NDArray[np.int64]) -> NDArray[np.int32]:
        """Actors [T, K] by table: each token's choices go to the actors its order names first."""
        # The ids shift the orders, so that ranks and steps of one row do not all begin alike.
        begin = int(ids_TK[0, 0]) if ids_TK.size else 0
        order_T1 = np.arange(begin, begin + len(ids_TK))[:, None] % len(self.orders_RE)
        return self.orders_RE[order_T1, ids_TK]

    def deal(self, code_TK: NDArray[np.int32], served: list[int]) -> NDArray[np.int32]:
        """Replaces the sets in `code_TK` by actors; copy c gets `served[c]` choices.

        Holder by holder, a set's choices are sorted by how much better their tokens like it than
        the later ones: most for being there already by other choices, least by the token's order.
        """
        flat = code_TK.reshape(-1)
        open_N = np.flatnonzero(flat >= self._graph.actors)
        set_N = flat.take(open_N) - self._graph.actors
        quota_GM = np.zeros(self._holder_GM.shape, np.int64)
        quota_GM[self._graph.set_C, self._nth_C] = served
        left = np.arange(len(open_N))
        for nth, key_N in enumerate(self._keys(code_TK, open_N, set_N)):
            left = left.take(np.argsort(key_N.take(left), kind="stable"))
            set_L = set_N.take(left)
            begin_G = np.searchsorted(set_L, self._sets)
            taken_L = np.arange(len(left)) < (begin_G + quota_GM[:, nth]).take(set_L)
            dealt = left[taken_L]
            flat[open_N.take(dealt)] = self._holder_MG[nth].take(set_N.take(dealt))
            left = left[~taken_L]
        flat[open_N.take(left)] = self._holder_MG[-1].take(set_N.take(left))
        return code_TK

    def _keys(
        self, code_TK: NDArray[np.int32], open_N: NDArray[np.int64], set_N: NDArray[np.int32]
    ) -> list[NDArray[np.integer]]:
        """By holder but the last: what sorts the choices by set, and in it by liking, [N]."""
        (rows, top_k), width = code_TK.shape, self._graph.actors + len(self._sets)
        visits_TC = np.zeros((rows, width), np.bool_)
        visits_TC[np.arange(rows)[:, None], code_TK] = True  # its sets as well, which no one reads
        token_N = open_N // top_k
        cell_N, order_N = (
            token_N * width,
            token_N % len(self.orders_RE) * len(self._sets) + set_N,
        )
        keys: list[NDArray[np.integer]] = []
        later_N: NDArray[np.int8] | None = None
        for nth in range(self._most - 1, -1, -1):
            here_N = visits_TC.take(cell_N + self._holder_MG[nth].take(set_N)).view(np.int8)
            if later_N is not None:
                likes_N = 2 * (here_N - later_N) + self._prefers_MX[nth].take(order_N)
                keys.append(set_N.astype(self._key) * 8 - likes_N)
                here_N = here_N | later_N
            later_N = here_N
        return keys[::-1]


def _orders(actors: int) -> NDArray[np.int64]:
    """[R, P]: orders of the actors, each first about as often, each pair either way alike.

    Up and down the numbers from evenly spread starts: of two actors, the one that comes first on
    the way up comes last on the way down from the same start, unless the start is one of them.
    """
    starts = min(actors, STARTS)
    start_S1 = (np.arange(starts) * actors // starts)[:, None]
    step_P = np.arange(actors)
    return np.concatenate([start_S1 + step_P, start_S1 - step_P]) % actors
