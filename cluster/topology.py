"""The machines under a mesh: what Ray has, what a mesh needs, which process gets which threads."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from expertmesh.cluster.membership import Kind
from expertmesh.cluster.settings import ClusterSettings


class TopologyError(ValueError):
    """The cluster cannot hold the mesh. The message holds both numbers."""


@dataclass(frozen=True, slots=True)
class Node:
    """cores: physical threads of the machine, not Ray's CPU slots."""

    id: str
    address: str
    hostname: str
    cores: int
    gpus: float


def gpus_per_actor(settings: ClusterSettings, nodes: Sequence[Node]) -> float:
    if settings.load.device == "cpu":
        return 0.0
    if settings.gpus_per_actor is not None:
        return settings.gpus_per_actor
    return 1.0 if any(node.gpus for node in nodes) else 0.0


def bundle_of(settings: ClusterSettings, gpus: float, kind: Kind) -> dict[str, float]:
    """What one actor of that kind reserves."""
    bundle = {"CPU": settings.cpus_per_actor}
    if gpus:
        bundle["GPU"] = gpus
    return bundle | custom_resources(settings, kind)


def custom_resources(settings: ClusterSettings, kind: Kind) -> dict[str, float]:
    own = settings.resources
    return dict(own.attention if kind == "attention" else own.experts)


def check_fits(needed: Sequence[Mapping[str, float]], available: Mapping[str, float]) -> None:
    """Raises TopologyError when even an empty cluster of this size could not hold the bundles.

    Ray itself would wait for ever, in case somebody adds a node.
    """
    for resource in dict.fromkeys(name for bundle in needed for name in bundle):
        takers = [bundle[resource] for bundle in needed if resource in bundle]
        total, have = sum(takers), available.get(resource, 0.0)
        if total > have + 1e-6:  # a sum of decimal fractions
            raise TopologyError(
                f"{len(takers)} actors need {total:g} Ray {resource} slots and the cluster has "
                f"{have:g}: start it with more, or ask for fewer actors"
            )


def threads_by_rank(homes: Sequence[str], nodes: Sequence[Node]) -> list[int]:
    """Threads for each rank: its node's cores shared by the ranks there, at least one.

    homes: node id of each rank.
    """
    cores = {node.id: node.cores for node in nodes}
    return [max(1, cores[home] // homes.count(home)) for home in homes]
