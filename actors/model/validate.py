"""Do the tensors in the files fit the config: names, shapes, dtypes, for the whole model at once.

A tensor that is missing would leave random memory in a parameter, a surplus one means that config
and weights are of different models (C3). Both are refused before anything is served.
"""

import logging
import re
from collections.abc import Iterator
from dataclasses import dataclass, field

from expertmesh.actors.model.config import ModelConfig
from expertmesh.actors.model.problems import CheckpointError, Problem
from expertmesh.actors.model.shard import Entry, Shard
from expertmesh.actors.model.shard_set import shorten
from expertmesh.actors.model.tensors import (
    GROUP_SIZE,
    TensorSpec,
    attention_part,
    expert_prefix,
    expert_shapes,
    packed_matrix,
)

_log = logging.getLogger(__name__)

# Parts of published checkpoints that the text path does not use. Anything else that the config
# does not ask for is refused.
IGNORED_PREFIXES = ("vision_tower.", "mm_projector.", "mtp.", "model.mtp.")
IGNORED_SUFFIXES = (".rotary_emb.inv_freq",)


@dataclass(slots=True)
class Inventory:
    """The checked tensors. Names are without the family prefix."""

    where: dict[str, tuple[Shard, str]] = field(default_factory=dict)  # name -> shard, full name
    attention: list[str] = field(default_factory=list)
    packed: set[tuple[int, int, str]] = field(default_factory=set)  # (layer, expert, "w1"...)
    ignored: list[tuple[Shard, str]] = field(default_factory=list)

    def entry(self, name: str) -> Entry:
        """Dtype, shape and place of tensor `name`. KeyError when there is none."""
        shard, full = self.where[name]
        return shard.entries[full]


@dataclass(slots=True)
class TensorSurvey:
    """Everything in which tensors and config differ, sorted by kind. hints: what explains many of
    them at once. storage: where the quantization claim and the files differ; the files win."""

    inventory: Inventory = field(default_factory=Inventory)
    twice: list[Problem] = field(default_factory=list)
    wrong: list[Problem] = field(default_factory=list)
    missing: list[Problem] = field(default_factory=list)
    extra: list[Problem] = field(default_factory=list)
    hints: list[Problem] = field(default_factory=list)
    storage: list[Problem] = field(default_factory=list)


def take_inventory(config: ModelConfig, shards: list[Shard]) -> Inventory:
    """Check every tensor of `shards` against `config`.

    Raises CheckpointError with the first ten findings and their number; each names the tensor and,
    where there is one, the shard.
    """
    survey = survey_tensors(config, shards)
    inventory = survey.inventory
    if survey.twice:
        raise CheckpointError(survey.twice[0].text)
    _refuse(survey)
    if inventory.ignored:
        prefixes = sorted({full.split(".", 1)[0] for _, full in inventory.ignored})
        _log.info(
            "checkpoint: %d tensors not used by the text model ignored (%s)",
            len(inventory.ignored),
            ", ".join(prefixes),
        )
    if survey.storage:
        _log.warning(
            "checkpoint: quantization_config and the stored experts disagree at %d modules, the "
            "files are followed: %s",
            len(survey.storage),
            shorten(problem.tensor for problem in survey.storage),
        )
    return inventory


def survey_tensors(config: ModelConfig, shards: list[Shard]) -> TensorSurvey:
    """As `take_inventory`, with every problem in place of an error."""
    survey = TensorSurvey()
    inventory = survey.inventory
    for shard in shards:
        for full in shard.entries:
            name = full.removeprefix(config.tensor_prefix)
            if _ignorable(config, name):
                inventory.ignored.append((shard, full))
            elif name in inventory.where:
                other, file = inventory.where[name][0].path.name, shard.path.name
                text = f"tensor {name} is in {other} and in {file}"
                survey.twice.append(Problem(text, file, full, "once", f"also in {other}"))
            else:
                inventory.where[name] = (shard, full)
    unseen = set(inventory.where)

    def check(spec: TensorSpec) -> None:
        if spec.name not in inventory.where:
            full = f"{config.tensor_prefix}{spec.name}"
            expected = f"{' or '.join(spec.dtypes)} {list(spec.shape)}"
            survey.missing.append(Problem(f"{full} is missing", "", full, expected, "nothing"))
            return
        unseen.discard(spec.name)
        shard, full = inventory.where[spec.name]
        entry = shard.entries[full]
        # Half a million tensors in K3: the usual case is decided without a generator.
        if entry.shape != spec.shape or entry.dtype not in spec.dtypes:
            survey.wrong.extend(_findings(config, spec, shard, full))

    for spec in attention_part(config):
        inventory.attention.append(spec.name)
        check(spec)
    for layer in config.moe_layers:
        for expert in range(config.num_experts):
            for spec in _stored_expert(config, inventory, layer, expert):
                check(spec)
    for name in sorted(unseen):
        shard, full = inventory.where[name]
        text = f"{full} in {shard.path.name}"
        survey.extra.append(Problem(text, shard.path.name, full, "no such tensor", "a tensor"))
    if inventory.packed:
        survey.hints += _odd_widths(config)
    if any(".experts." in name and not re.search(r"\.experts\.\d+\.", name) for name in unseen):
        survey.hints.append(
            Problem(
                "stacked or fused experts are not read, only "
                "block_sparse_moe.experts.{e}.{w1,w2,w3}.{weight | weight_packed + weight_scale}"
            )
        )
    survey.storage = list(_other_storage(config, inventory))
    return survey


def _stored_expert(
    config: ModelConfig, inventory: Inventory, layer: int, expert: int
) -> Iterator[TensorSpec]:
    """The tensors of one expert. How a matrix is stored is decided by what the file holds: the
    ignore list of the published config is incomplete (k3-model.md 3.3)."""
    prefix = expert_prefix(layer, expert)
    for matrix, (rows, columns) in expert_shapes(config).items():
        name = f"{prefix}{matrix}"
        if f"{name}.weight_packed" in inventory.where or f"{name}.weight_scale" in inventory.where:
            inventory.packed.add((layer, expert, matrix))
            yield from packed_matrix(name, rows, columns)
        elif f"{name}.weight" not in inventory.where and config.quantization is not None:
            yield from packed_matrix(name, rows, columns)  # so that the missing ones are named
        else:
            yield TensorSpec(f"{name}.weight", (rows, columns))


def _findings(config: ModelConfig, spec: TensorSpec, shard: Shard, full: str) -> Iterator[Problem]:
    entry, file = shard.entries[full], shard.path.name

    def wrong(what: str, found: object, expected: str) -> Problem:
        text = f"{full} in {file}: {what} {found}, expected {expected}"
        return Problem(text, file, full, f"{what} {expected}", f"{what} {found}")

    if entry.dtype not in spec.dtypes:
        yield wrong("dtype", entry.dtype, " or ".join(spec.dtypes))
    if spec.name.endswith(".A_log"):
        if not _a_log_shape_fits(config, entry.shape):
            heads = config.kda_heads
            shapes = f"[{heads}], [{heads} padded with zeros] or [1, 1, {heads}, 1]"
            yield wrong("shape", list(entry.shape), shapes)
    elif entry.shape != spec.shape:
        groups = f" (group size {GROUP_SIZE})" if full.endswith("weight_scale") else ""
        yield wrong("shape", list(entry.shape), f"{list(spec.shape)}{groups}")


def _a_log_shape_fits(config: ModelConfig, shape: tuple[int, ...]) -> bool:
    """One value per head. One per channel ([H*D] or [H, D]) would load and decay wrongly (C11)."""
    heads = config.kda_heads
    if len(shape) == 1:
        padded_to = max(2 * heads, -(-heads // 128) * 128)
        per_channel = config.kda_head_dim > 1 and shape[0] == heads * config.kda_head_dim
        return heads <= shape[0] <= padded_to and not per_channel
    return shape == (1, 1, heads, 1)


def _ignorable(config: ModelConfig, name: str) -> bool:
    if name.startswith(IGNORED_PREFIXES) or name.endswith(IGNORED_SUFFIXES):
        return True
    if config.mtp_layers:  # published as further layers after the last one
        match = re.match(r"model\.layers\.(\d+)\.", name)
        last = config.num_layers + config.mtp_layers
        return match is not None and config.num_layers <= int(match[1]) < last
    return False


def _odd_widths(config: ModelConfig) -> Iterator[Problem]:
    for key in ("moe_intermediate_size", "latent_size"):
        width = getattr(config, key)
        if width % GROUP_SIZE:
            yield Problem(
                f"experts are stored as mxfp4, but {key} {width} is no multiple of the group size "
                f"{GROUP_SIZE}",
                expected=f"{key} a multiple of {GROUP_SIZE}",
                found=str(width),
            )


def _refuse(survey: TensorSurvey) -> None:
    kinds = (
        (survey.wrong, "wrong"),
        (survey.missing, "missing"),
        (survey.extra, "not asked for by the config"),
    )
    parts = [
        f"{len(problems)} {kind}: {shorten(problem.text for problem in problems)}"
        for problems, kind in kinds
        if problems
    ]
    parts += [hint.text for hint in survey.hints]
    if parts:
        raise CheckpointError("tensors do not fit the config: " + "; ".join(parts))


def _other_storage(config: ModelConfig, inventory: Inventory) -> Iterator[Problem]:
    """Where the config's quantization claim and the files disagree; the files win (C10)."""
    for layer in config.moe_layers:
        for matrix in expert_shapes(config):
            # Ignore lists name kinds of modules, so the first expert speaks for its layer.
            module = f"{expert_prefix(layer, 0)}{matrix}"
            claim = claims_packed(config, module)
            stored = sum((layer, e, matrix) in inventory.packed for e in range(config.num_experts))
            if stored != (config.num_experts if claim else 0):
                full = f"{config.tensor_prefix}{module}"
                expected = "mxfp4" if claim else "plain"
                found = f"{stored} of {config.num_experts} experts in mxfp4"
                text = f"{full}: quantization_config says {expected}, the files hold {found}"
                yield Problem(text, "config.json", full, expected, found)


def claims_packed(config: ModelConfig, module: str) -> bool:
    """Whether `quantization_config` says that `module` (no family prefix) is mxfp4.

    Its ignore entries are exact names or `re:` patterns, and occur with and without the prefix.
    """
    if config.quantization is None:
        return False
    names = (module, config.tensor_prefix + module)
    for pattern in config.quantization.ignore:
        if pattern.startswith("re:"):
            if any(re.match(pattern[3:], name) for name in names):
                return False
        elif pattern in names:
            return False
    return True
