"""Oracles for the least possible load of the most loaded actor: two ways to solve the same."""

import itertools

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import linprog
from scipy.sparse import coo_matrix


def by_subsets(holds_PE: NDArray[np.bool_], counts_E: NDArray[np.integer]) -> int:
    """By duality: some actors must serve all that only they can. Exact; 2^P subsets."""
    actors, least = len(holds_PE), 0
    for size in range(1, actors + 1):
        for some in itertools.combinations(range(actors), size):
            others = [actor for actor in range(actors) if actor not in some]
            only_E = ~holds_PE[others].any(0)
            least = max(least, -(-int(counts_E[only_E].sum()) // size))
    return least


def by_linear_program(holds_PE: NDArray[np.bool_], counts_E: NDArray[np.number]) -> float:
    """The optimum in fractions of a choice; in whole choices it is the next integer."""
    actors, experts = holds_PE.shape
    expert_C, actor_C = np.nonzero(holds_PE.T)
    copies = len(expert_C)
    serves = coo_matrix((np.ones(copies), (expert_C, np.arange(copies))), (experts, copies + 1))
    entries = np.concatenate([np.ones(copies), -np.ones(actors)])
    rows = np.concatenate([actor_C, np.arange(actors)])
    columns = np.concatenate([np.arange(copies), np.full(actors, copies)])
    below = coo_matrix((entries, (rows, columns)), (actors, copies + 1))
    cost = np.zeros(copies + 1)
    cost[-1] = 1.0
    solved = linprog(
        cost, A_ub=below.tocsr(), b_ub=np.zeros(actors), A_eq=serves.tocsr(), b_eq=counts_E
    )
    assert solved.status == 0, solved.message
    return float(solved.fun)
