"""Which copy of an expert serves which token.

P expert actors, E experts, T rows, K experts per token.
"""

import numpy as np
from numpy.typing import NDArray


class ReplicaChoice:
    """The copies of one layer under one routing version. Immutable, so any thread may ask."""

    def __init__(self, holds_PE: NDArray[np.bool_]) -> None:
        """holds_PE: actor p has a copy of expert e. Raises ValueError for an expert without one."""
        self._copies_E = holds_PE.sum(0)
        if not self._copies_E.all():
            orphans = np.flatnonzero(self._copies_E == 0)
            raise ValueError(f"no actor holds experts {orphans[:8].tolist()}")
        most = int(self._copies_E.max())
        # Holders first, in actor order; an expert with fewer copies repeats its last one.
        order_PE = np.argsort(~holds_PE, axis=0, kind="stable").astype(np.int32)
        nth_E1 = np.minimum(np.arange(most), self._copies_E[:, None] - 1)
        self._holders_EC = np.take_along_axis(order_PE.T, nth_E1, axis=1)
        self._home_E = np.ascontiguousarray(self._holders_EC[:, 0])

    def assign(self, ids_TK: NDArray[np.int64]) -> NDArray[np.int32]:
        """int32 [T, K]: the actor that serves each choice, always a holder of the expert."""
        if self._holders_EC.shape[1] == 1:
            return self._home_E[ids_TK]
        ids = ids_TK.reshape(-1)
        order = np.argsort(ids, kind="stable")
        ordinal = np.empty(ids.size, np.int64)
        begins_E = np.searchsorted(ids[order], np.arange(len(self._home_E)))
        ordinal[order] = np.arange(ids.size) - begins_E[ids[order]]
        return self._holders_EC[ids, ordinal % self._copies_E[ids]].reshape(ids_TK.shape)
