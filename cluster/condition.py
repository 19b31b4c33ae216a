"""How a mesh is, and what has happened to it."""

import time
from dataclasses import dataclass, field


@dataclass
class Counts:
    """What has happened since the mesh started. recovery_s: of the last recovery."""

    failovers: int = 0
    losses: int = 0
    joins: int = 0
    failed_joins: int = 0
    recovery_s: float = 0.0


@dataclass(frozen=True)
class Status:
    """state: ready | recovering | unserviceable | stopped. since: monotonic, of the trouble."""

    state: str = "ready"
    reason: str = ""
    since: float = field(default_factory=time.monotonic)
