"""What a checkpoint holds, in numbers; and what one of a given config would hold."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from math import prod
from pathlib import Path

from expertmesh.actors.model.config import ModelConfig
from expertmesh.actors.model.tensors import attention_part, expert_part
from expertmesh.actors.model.validate import Inventory


@dataclass(slots=True)
class PartSummary:
    """Tensors and bytes of one part of the model, by dtype as stored."""

    tensors: dict[str, int] = field(default_factory=dict)
    bytes: dict[str, int] = field(default_factory=dict)
    parameters: int = 0

    def add(self, dtype: str, nbytes: int, parameters: int, times: int = 1) -> None:
        """Count `times` tensors of this kind."""
        self.tensors[dtype] = self.tensors.get(dtype, 0) + times
        self.bytes[dtype] = self.bytes.get(dtype, 0) + times * nbytes
        self.parameters += times * parameters

    @property
    def total_bytes(self) -> int:
        """Bytes over all dtypes."""
        return sum(self.bytes.values())


@dataclass(frozen=True, slots=True)
class CheckpointSummary:
    """attention: everything but routed experts. experts: the routed experts. A packed matrix counts
    its logical parameters once; scales count none. ignored: tensors outside the text model."""

    shards: int
    attention: PartSummary
    experts: PartSummary
    ignored: PartSummary
    packed_matrices: int
    plain_matrices: int

    @property
    def tensors_by_dtype(self) -> dict[str, int]:
        """Text tensors (both parts) per dtype."""
        kinds = [*self.attention.tensors, *self.experts.tensors]
        return {
            kind: self.attention.tensors.get(kind, 0) + self.experts.tensors.get(kind, 0)
            for kind in sorted(set(kinds))
        }

    @property
    def text_bytes(self) -> int:
        """Bytes of both parts."""
        return self.attention.total_bytes + self.experts.total_bytes


def summarize(inventory: Inventory, shards: Iterable[Path]) -> CheckpointSummary:
    """Count a validated checkpoint from its headers."""
    attention, experts, ignored = PartSummary(), PartSummary(), PartSummary()
    of_attention = set(inventory.attention)
    plain = 0
    for name in inventory.where:
        entry = inventory.entry(name)
        part = attention if name in of_attention else experts
        part.add(entry.dtype, entry.nbytes, _parameters(name, entry.shape))
        plain += part is experts and name.endswith(".weight")
    for shard, full in inventory.ignored:
        entry = shard.entries[full]
        ignored.add(entry.dtype, entry.nbytes, prod(entry.shape))
    packed = len(inventory.packed)
    return CheckpointSummary(len(list(shards)), attention, experts, ignored, packed, plain)


def expected_summary(config: ModelConfig, packed: bool = True) -> CheckpointSummary:
    """The summary of a checkpoint of `config` in the published dtypes, without any file."""
    attention, experts = PartSummary(), PartSummary()
    for spec in attention_part(config):
        attention.add(spec.dtypes[0], spec.nbytes, prod(spec.shape))
    count = len(config.moe_layers) * config.num_experts
    if count:
        for spec in expert_part(config, config.moe_layers[0], 0, packed):
            parameters = _parameters(spec.name, spec.shape)
            experts.add(spec.dtypes[0], spec.nbytes, parameters, count)
    matrices = 3 * count
    return CheckpointSummary(
        0, attention, experts, PartSummary(), matrices * packed, matrices * (not packed)
    )


def _parameters(name: str, shape: tuple[int, ...]) -> int:
    if name.endswith(".weight_scale"):
        return 0
    return prod(shape) * (2 if name.endswith(".weight_packed") else 1)
