"""DeepSeek's expert-parallel load balancer, written from the description of its interface.

`rebalance_experts(weight, replicas, groups, nodes, gpus)` in two versions that give the same
answer: with the packing as loops over layers and items, as published, and with all layers at once,
which is how fast public variants do it. L rows (layers), N items, E experts, R replicas.
"""

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Packing = Callable[[Floats, int], tuple[Ints, Ints]]


def balanced_packing(weight_LN: Floats, packs: int) -> tuple[Ints, Ints]:
    """(pack, rank in the pack) of each item: heaviest first, to the lightest pack not full."""
    rows, items = weight_LN.shape
    room = items // packs
    pack_LN, rank_LN = np.zeros((rows, items), np.int64), np.zeros((rows, items), np.int64)
    for row, order in enumerate(np.argsort(-weight_LN, axis=1, kind="stable").tolist()):
        loads, sizes = [0.0] * packs, [0] * packs
        for item in order:
            pack = min((p for p in range(packs) if sizes[p] < room), key=loads.__getitem__)
            pack_LN[row, item], rank_LN[row, item] = pack, sizes[pack]
            loads[pack] += weight_LN[row, item]
            sizes[pack] += 1
    return pack_LN, rank_LN


def packing_of_all_layers(weight_LN: Floats, packs: int) -> tuple[Ints, Ints]:
    """The same, one item of every row at a time."""
    rows, items = weight_LN.shape
    room = items // packs
    pack_LN, rank_LN = np.zeros((rows, items), np.int64), np.zeros((rows, items), np.int64)
    order_LN = np.argsort(-weight_LN, axis=1, kind="stable")
    row_L = np.arange(rows)
    load_LP, size_LP = np.zeros((rows, packs)), np.zeros((rows, packs), np.int64)
    for nth in range(items):
        item_L = order_LN[:, nth]
        pack_L = load_LP.argmin(1)
        rank_L = size_LP[row_L, pack_L]
        pack_LN[row_L, item_L], rank_LN[row_L, item_L] = pack_L, rank_L
        size_LP[row_L, pack_L] += 1
        load_LP[row_L, pack_L] += weight_LN[row_L, item_L]
        load_LP[row_L[rank_L + 1 == room], pack_L[rank_L + 1 == room]] = np.inf
    return pack_LN, rank_LN


def replicate_experts(weight_LE: Floats, replicas: int) -> tuple[Ints, Ints]:
    """(expert of each replica [L, R], count [L, E]): each spare one to the greatest load a copy."""
    rows, experts = weight_LE.shape
    expert_LR = np.tile(np.arange(replicas), (rows, 1))
    count_LE = np.ones((rows, experts), np.int64)
    row_L = np.arange(rows)
    for replica in range(experts, replicas):
        expert_L = (weight_LE / count_LE).argmax(1)
        expert_LR[:, replica] = expert_L
        count_LE[row_L, expert_L] += 1
    return expert_LR, count_LE


def rebalance_experts(
    weight_LE: Floats,
    replicas: int,
    groups: int,
    nodes: int,
    gpus: int,
    packing: Packing = balanced_packing,
) -> Ints:
    """[L, R]: the expert of each slot, GPU by GPU (the published phy2log).

    Groups go to nodes where they divide, then replicas are made inside each node and packed on its
    GPUs; otherwise all experts are one group on one node.
    """
    if groups % nodes:
        groups, nodes = 1, 1
    rows, experts = weight_LE.shape
    group = experts // groups
    node_LG, rank_LG = packing(weight_LE.reshape(rows, groups, group).sum(2), nodes)
    place_LG = node_LG * (groups // nodes) + rank_LG
    order_LG = np.argsort(place_LG, axis=1, kind="stable")
    expert_LE = (order_LG[:, :, None] * group + np.arange(group)).reshape(rows, experts)
    of_node = np.take_along_axis(weight_LE, expert_LE, 1).reshape(rows * nodes, experts // nodes)
    copy_NR, count_NE = replicate_experts(of_node, replicas // nodes)
    share_NR = np.take_along_axis(of_node / count_NE, copy_NR, 1)
    gpu_NR, rank_NR = packing(share_NR, gpus // nodes)
    slot_NR = gpu_NR * (replicas // gpus) + rank_NR
    in_slot_NR = np.take_along_axis(copy_NR, np.argsort(slot_NR, axis=1, kind="stable"), 1)
    begin_N1 = (np.arange(rows * nodes) % nodes * (experts // nodes))[:, None]
    return np.take_along_axis(expert_LE, (in_slot_NR + begin_N1).reshape(rows, replicas), 1)
