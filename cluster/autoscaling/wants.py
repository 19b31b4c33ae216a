"""How many members a pool's present numbers ask for. Pure functions, without time.

Each has a dead band: what makes a pool grow by one would not let it shrink again, and the reverse.
"""

import math

from expertmesh.cluster.autoscaling.settings import AttentionScaling, ExpertScaling
from expertmesh.cluster.autoscaling.signals import AttentionSignals, ExpertSignals, Want


def want_experts(signals: ExpertSignals, actors: int, settings: ExpertScaling) -> Want:
    """actors: the present number, at least 1."""
    room = -(-signals.experts // signals.slots) + settings.spare_actors
    if room > settings.min_actors:
        least = Want(
            min(room, settings.max_actors),
            f"{signals.experts} experts in {signals.slots} slots an actor, with "
            f"{settings.spare_actors} to lose, take {room}",
        )
    else:
        least = Want(settings.min_actors, f"min_actors {settings.min_actors}")
    most = Want(settings.max_actors, f"max_actors {settings.max_actors}")
    return _bounded(_experts_by_load(signals, actors, settings), least, most)


def want_attention(signals: AttentionSignals, replicas: int, settings: AttentionScaling) -> Want:
    """replicas: the present number, at least 1."""
    least = Want(settings.min_replicas, f"min_replicas {settings.min_replicas}")
    most = Want(settings.max_replicas, f"max_replicas {settings.max_replicas}")
    return _bounded(_attention_by_load(signals, replicas, settings), least, most)


def _experts_by_load(signals: ExpertSignals, actors: int, settings: ExpertScaling) -> Want:
    # The step waits for the busiest actor, so its share is the pool's.
    busy = signals.busy_share * max(signals.imbalance, 1.0)
    low, high = settings.low_busy_share, settings.high_busy_share
    if busy > high:
        # So many that the busiest is in the middle of the band.
        enough = math.ceil(actors * busy / ((low + high) / 2))
        return Want(max(actors + 1, enough), f"busy share {busy:.2f} > {high:g}")
    if busy >= low:
        at = f"at busy share {busy:.2f}"
        if signals.wait_share > settings.high_wait_share:
            waits = f"wait share {signals.wait_share:.2f} > {settings.high_wait_share:g}"
            return Want(actors + 1, f"{waits} {at}")
        if signals.imbalance > settings.max_imbalance:
            uneven = f"imbalance {signals.imbalance:.2f} > {settings.max_imbalance:g}"
            return Want(actors + 1, f"{uneven} {at}")
    if (then := _with_one_fewer(busy, actors)) < low:
        return Want(actors - 1, f"busy share {then:.2f} < {low:g} with one actor fewer")
    return Want(actors, "")


def _attention_by_load(
    signals: AttentionSignals, replicas: int, settings: AttentionScaling
) -> Want:
    used, queued = signals.occupancy, signals.queued_tokens / replicas
    low, high = settings.low_occupancy, settings.high_occupancy
    if used > high:
        enough = math.ceil(replicas * used / ((low + high) / 2))
        return Want(max(replicas + 1, enough), f"occupancy {used:.2f} > {high:g}")
    if queued > settings.high_queued_tokens:
        # One at a time: a queue says that more are needed, not how many.
        limit = settings.high_queued_tokens
        return Want(replicas + 1, f"{queued:.0f} tokens queued per replica > {limit}")
    then, queue = _with_one_fewer(used, replicas), _with_one_fewer(queued, replicas)
    if then < low and queue < settings.low_queued_tokens:
        return Want(replicas - 1, f"occupancy {then:.2f} < {low:g} with one replica fewer")
    return Want(replicas, "")


def _with_one_fewer(share: float, members: int) -> float:
    return share * members / (members - 1) if members > 1 else math.inf


def _bounded(want: Want, least: Want, most: Want) -> Want:
    if least.count <= want.count <= most.count:
        return want
    bound = least if want.count < least.count else most
    return Want(bound.count, f"{want.reason}, but {bound.reason}" if want.reason else bound.reason)
