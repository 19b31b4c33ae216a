"""What a plan starts from: refusals by name, and every expert on an actor that stays."""

import numpy as np
from numpy.typing import NDArray

from expertmesh.cluster.balancing.plan import BalanceError, padded
from expertmesh.cluster.balancing.recovery import seat_orphans
from expertmesh.cluster.balancing.table import FREE, Floats, Ints, Rows
from expertmesh.cluster.placement import Placement


def check_input(
    loads_LE: Floats, old: Placement, slots: int, ranks: int, staying: list[int]
) -> None:
    layers = tuple(old.held)
    if loads_LE.ndim != 2 or len(loads_LE) != len(layers) or not loads_LE.size:
        raise BalanceError(
            f"loads have shape {list(loads_LE.shape)}: [{len(layers)} layers, experts] is needed"
        )
    bad = ~(np.isfinite(loads_LE) & (loads_LE >= 0))
    if bad.any():
        layer, expert = np.argwhere(bad)[0]
        raise BalanceError(
            f"the load of layer {layers[layer]} expert {expert} is {loads_LE[layer, expert]}"
        )
    if ranks < old.actors:
        raise BalanceError(
            f"{ranks} ranks are fewer than the {old.actors} of today: name who leaves"
        )
    experts = loads_LE.shape[1]
    if len(staying) * slots < experts:
        needed = -(-experts // len(staying)) if staying else experts
        raise BalanceError(
            f"{len(staying)} actors with {slots} slots cannot hold {experts} experts per layer: "
            f"at least {needed} slots each are needed"
        )


def check_held(table_LPS: Ints, layers: tuple[int, ...], experts: int) -> None:
    if table_LPS.max() >= experts:
        at = int((table_LPS.max((1, 2)) >= experts).argmax())
        raise BalanceError(
            f"layer {layers[at]} holds expert {table_LPS[at].max()}, loads are for {experts}"
        )
    flat_LPS = table_LPS + (np.arange(len(layers)) * experts)[:, None, None]
    held_LPS = table_LPS != FREE
    held_K = np.zeros(len(layers) * experts, bool)
    held_K[flat_LPS if held_LPS.all() else flat_LPS[held_LPS]] = True
    if not held_K.all():
        layer, expert = divmod(int(held_K.argmin()), experts)
        raise BalanceError(f"layer {layers[layer]}: no actor holds expert {expert}")


def mended(
    old: Placement, slots: int, ranks: int, staying: list[int]
) -> tuple[list[Rows], NDArray[np.bool_]]:
    """The layers over the staying actors, each expert held and no actor over its slots.

    Returns them and which ones had to change for that.
    """
    layers: list[Rows] = []
    changed_L = np.zeros(len(old.held), bool)
    for index, held in enumerate(old.held.values()):
        rows = padded(held, ranks)
        kept = rows if len(staying) == ranks else tuple(rows[actor] for actor in staying)
        if len(staying) < ranks or max(map(len, kept)) > slots:
            cut = [list(ids[:slots]) for ids in kept]
            everything = {expert for ids in rows for expert in ids}
            orphans = sorted(everything.difference(*cut))
            seat_orphans(cut, orphans, slots)
            kept = tuple(map(tuple, cut))
            changed_L[index] = True
        layers.append(kept)
    return layers, changed_L
