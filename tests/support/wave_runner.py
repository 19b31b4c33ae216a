"""Runs the waves of a plan on a mesh of dicts, checking what a real mesh relies on."""

from expertmesh.cluster.balancing.waves import Wave
from expertmesh.cluster.placement import Placement


def run(
    old: Placement, waves: tuple[Wave, ...], slots: int, staging: int, actors: int
) -> Placement:
    """Executes on a mesh of dicts: every slot has the bytes of its expert, copied and hashed."""
    stores: list[dict[tuple[int, int], bytes]] = [{} for _ in range(actors)]
    for layer, held in old.held.items():
        for actor, ids in enumerate(held):
            for expert in ids:
                stores[actor][layer, expert] = f"weights {layer} {expert}".encode()
    routed = old
    for wave in waves:
        targets: dict[int, int] = {}
        for batch in wave.rounds:
            peers: dict[int, set[int]] = {}
            for move in batch:
                assert move.source != move.target
                peers.setdefault(move.source, set()).add(move.target)
                peers.setdefault(move.target, set()).add(move.source)
                # Only what was routed when the wave began is known to be good.
                assert move.expert in routed.held[move.layer][move.source]
                assert (move.layer, move.expert) not in stores[move.target]
                packet = stores[move.source][move.layer, move.expert]
                stores[move.target][move.layer, move.expert] = packet
                targets[move.target] = targets.get(move.target, 0) + 1
            assert all(len(others) == 1 for others in peers.values())
        assert max(targets.values(), default=0) <= staging
        for layer in old.held:
            for store in stores:
                assert sum(key[0] == layer for key in store) <= slots + staging
        routed = wave.placement
        for drop in wave.drops:
            assert drop.expert not in routed.held[drop.layer][drop.actor]
            del stores[drop.actor][drop.layer, drop.expert]
        for layer, held in routed.held.items():
            assert {e for ids in held for e in ids} == {e for ids in old.held[layer] for e in ids}
            for actor, ids in enumerate(held):
                assert len(ids) == len(set(ids)) <= slots
                found = {expert for at, expert in stores[actor] if at == layer}
                assert found == set(ids)
                for expert in ids:
                    assert stores[actor][layer, expert] == f"weights {layer} {expert}".encode()
    return routed
