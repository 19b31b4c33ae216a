"""From settings to the tiers below a device."""

import logging
import os
from collections.abc import Callable

from expertmesh.actors.state.disk.errors import DiskFailed
from expertmesh.actors.state.disk.log import DiskLog
from expertmesh.actors.state.item import StateLayout
from expertmesh.actors.state.settings import StateSettings
from expertmesh.actors.state.tiers.store import TieredStore

_log = logging.getLogger(__name__)

# A secret of at least 16 bytes: what is on disk is encrypted and authenticated with it.
SECRET = "EXPERTMESH_STATE_SECRET"


def open_tiers(
    layout: StateLayout,
    settings: StateSettings,
    wake: Callable[[], None],
    transit_bytes: int | None = None,
) -> TieredStore | None:
    """None where the settings name no tier. A folder that cannot be used costs what is in it, not
    the service: it is told and done without.

    wake: called, from other threads, when something that was asked for is there. transit_bytes: as
    TieredStore has it. Raises ValueError
    for a secret that is too short.
    """
    disk: DiskLog | None = None
    if settings.disk is not None and settings.disk_bytes is not None:
        secret = os.environ.get(SECRET, "").encode() or None
        try:
            disk = DiskLog.open(
                settings.disk,
                capacity=settings.disk_bytes,
                layout=layout.fingerprint,
                secret=secret,
            )
        except DiskFailed as error:
            _log.error("state is not kept on disk: %s: %s", settings.disk, error)
    if disk is None and not settings.host_bytes:
        return None
    return TieredStore(layout, settings, disk=disk, wake=wake, transit_bytes=transit_bytes)
