"""Where a replica keeps the state of prefixes and sessions, and how much of it."""

from pathlib import Path
from typing import Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

KvMode = Literal["exact", "offload", "select"]
Codec = Literal["raw", "lossless", "int8", "int4"]
# Room for what is written before anything old can go.
LEAST_DISK_BYTES = 64 << 20


class StateSettings(BaseModel):
    """Frozen; unknown keys are refused by name. Sizes are per replica, but `disk` is shared by the
    replicas of a node (kv-state 3.0)."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    prefix_cache: bool = Field(
        True, description="Whether prompts that begin alike share what was computed for them."
    )
    snapshots: int = Field(
        16,
        ge=1,
        description="Places for KDA snapshots on the device, beside the slots of running "
        "sequences. More of them lie in pages that nobody needs.",
    )
    ladder_tokens: int = Field(
        4096,
        ge=64,
        multiple_of=64,
        description="A snapshot at least every so many tokens of a long prompt, thinned with "
        "distance.",
    )
    host_bytes: int = Field(
        256 << 20, ge=0, description="Host memory for pages and snapshots; 0: none."
    )
    codec: Codec = Field(
        "lossless",
        description="How they are packed there and on disk. Of int8 and int4 host memory keeps "
        "estimates and `disk` the exact bytes, which every load reads; mode select proves bounds.",
    )
    disk: Path | None = Field(
        None, description="Folder for pages, snapshots and sessions that outlive the process."
    )
    disk_bytes: int | None = Field(
        None, ge=LEAST_DISK_BYTES, description="Most bytes in that folder. Must be given with it."
    )
    checkpoint_tokens: int = Field(
        256,
        ge=64,
        multiple_of=64,
        description="With `disk`: a running answer's state is saved every so many tokens, which "
        "bounds what another replica computes again when this one is lost.",
    )
    session_ttl_s: float = Field(
        86_400.0, gt=0, description="A session that nobody has used for so long is dropped."
    )
    sessions_per_tenant: int = Field(1024, ge=1, description="Most sessions of one tenant.")
    read_timeout_s: float = Field(
        2.0, gt=0, description="A read that takes longer is a miss: the tokens are recomputed."
    )
    write_timeout_s: float = Field(
        10.0, gt=0, description="A write that takes longer closes the tier to writes for a while."
    )
    write_bytes_per_s: float = Field(
        64e6, gt=0, description="Writes that only serve the cache; what sessions save goes at once."
    )
    queue: int = Field(
        256, ge=1, description="Items that may wait for a tier; what does not fit is not stored."
    )
    kv_mode: KvMode = Field(
        "exact",
        description="Where requests do not say: exact (everything on the device), offload (old "
        "pages in host memory, streamed, the same bits) or select (old pages in host memory, the "
        "ones that matter read; an estimate).",
    )
    sink_tokens: int = Field(
        64, ge=64, multiple_of=64, description="First tokens that stay on the device."
    )
    window_tokens: int = Field(
        4096, ge=64, multiple_of=64, description="Last tokens that stay on the device."
    )
    offload_bytes: int = Field(
        256 << 20,
        ge=0,
        description="Host memory, beside host_bytes, for pages that running sequences have off the "
        "device. Who finds none left waits; who could never have enough stays on the device.",
    )
    offload_disk_bytes: int = Field(
        0,
        ge=0,
        description="Disk, beside disk_bytes and in files without a name in the same folder, for "
        "the oldest of those pages when that memory is filled; 0: none.",
    )
    offload_disk_tokens: int = Field(
        1024, ge=64, multiple_of=64, description="Old tokens that go to that disk at a time."
    )
    select_mass: float = Field(
        0.98,
        gt=0,
        le=1,
        description="Attention mass that selected pages should hold, by estimate. With int8 or "
        "int4, 1 minus this is the relative error that an attention output may have, proven.",
    )
    select_pages: int = Field(
        64, ge=1, description="Most old pages that a step reads exactly, per layer."
    )

    @model_validator(mode="after")
    def _capped(self) -> Self:
        if self.disk is not None and self.disk_bytes is None:
            raise ValueError("disk needs disk_bytes: a folder without a cap fills the disk")
        if self.disk is None and self.disk_bytes is not None:
            raise ValueError("disk_bytes needs disk")
        if self.disk is None and self.offload_disk_bytes:
            raise ValueError("offload_disk_bytes needs disk")
        return self

    @property
    def offload_disk_pages(self) -> int:
        """Pages of a piece on disk."""
        return self.offload_disk_tokens // 64

    @property
    def places(self) -> int:
        """Snapshots that the device has room for: none where no request looks for any."""
        return self.snapshots if self.prefix_cache or self.disk is not None else 0

    @property
    def lossy(self) -> bool:
        """Whether what comes back from a lower tier is an approximation."""
        return self.codec in ("int8", "int4")

    @property
    def needs_disk(self) -> bool:
        """Whether what leaves the device would never come back: host memory keeps estimates of it,
        every load wants the exact bytes, and there is no disk that has them."""
        return self.lossy and self.host_bytes > 0 and self.disk is None
