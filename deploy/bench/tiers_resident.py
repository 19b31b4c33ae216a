"""What the sequences of an engine hold on its device, as it is accounted for."""

from expertmesh.actors.attention.engine import Engine
from expertmesh.actors.attention.sequence import Sequence


class Resident:
    """The most bytes of one sequence, over all steps that it has been shown.

    latents: pages on the device; near: the same while answering. index, recent: sketches, and old
    pages that late steps have read, both on the device. scratch: rows that are gathered there for
    one layer, shared by all sequences. host, disk: old pages in host memory, and room
    that they have on disk.
    """

    def __init__(self) -> None:
        self.latents = self.near = self.index = self.recent = self.scratch = self.host = 0
        self.disk = 0

    @property
    def answering(self) -> int:
        return self.near + self.index + self.recent

    def look(self, engine: Engine) -> None:
        self.disk = max(self.disk, engine.scheduler.room.disk_bytes)
        for seq in engine.scheduler.running:
            self._one(seq, len(seq.near) * engine.state.page_bytes)

    def _one(self, seq: Sequence, latents: int) -> None:
        self.latents = max(self.latents, latents)
        if seq.generated:
            self.near = max(self.near, latents)
        if seq.context is not None:
            self.index = max(self.index, seq.context.index_bytes)
            self.recent = max(self.recent, seq.context.recent_bytes)
            self.scratch = max(self.scratch, seq.context.scratch_bytes)
            self.host = max(self.host, seq.context.host_bytes)
