"""Everything that can refuse a start, checked before the first process: each with its own exit
code and a message that says what to do."""

import errno
import socket
from dataclasses import dataclass
from pathlib import Path

import psutil
import torch

from expertmesh.actors.attention.settings import EngineSettings
from expertmesh.actors.model.batch import PAGE_TOKENS
from expertmesh.actors.model.checkpoint import Checkpoint, CheckpointError
from expertmesh.actors.model.config import ConfigError, ModelConfig, load_config
from expertmesh.actors.model.graphs import Choice, GraphsUnavailable, wanted
from expertmesh.actors.model.loading import Dtype, LoadSettings, placed
from expertmesh.actors.model.summary import CheckpointSummary
from expertmesh.actors.model.tokenizer import MODEL_FILE, Tokenizer, TokenizerError
from expertmesh.actors.state.item import StateLayout
from expertmesh.actors.state.model_state import bytes_per_page, bytes_per_slot
from expertmesh.actors.state.offload.room import OffloadRoom
from expertmesh.actors.state.tiers.store import TRANSIT_BYTES
from expertmesh.cluster.placement import PlacementError, check_actors
from expertmesh.deploy.edge_settings import TlsSettings
from expertmesh.deploy.exit_codes import ExitCode, Refused
from expertmesh.deploy.listener import hold
from expertmesh.kernels.registry import KernelsUnavailable, parse_choice, resolve

# A process before it holds any weights: interpreter, torch, Ray's own threads.
PROCESS_BYTES = 300 << 20
# Ray's daemons, its object store and the front door.
RAY_BYTES = 700 << 20


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Bytes on this machine if everything runs here. experts: packed, over all slots of all actors
    together. host_cache: pages and snapshots beside the device's. offloaded: pages that running
    sequences have off it."""

    attention: int
    experts: int
    expert_cache: int
    state: int
    processes: int
    host_cache: int = 0
    offloaded: int = 0

    @property
    def total(self) -> int:
        weights = self.attention + self.experts + self.expert_cache
        return weights + self.state + self.host_cache + self.offloaded + self.processes


def check_folder(folder: Path) -> ModelConfig:
    """The model's config. Refused when there is no such folder or its config does not serve."""
    if not folder.exists():
        raise Refused(
            ExitCode.NO_MODEL,
            f"the model folder {folder} does not exist",
            "pass the path of a checkpoint folder, or leave it out for the bundled model",
        )
    if not folder.is_dir() or not (folder / "config.json").exists():
        raise Refused(
            ExitCode.NO_MODEL,
            f"{folder} is not a checkpoint folder: it has no config.json",
            "pass the folder that holds config.json and the safetensors shards",
        )
    try:
        return load_config(folder)
    except ConfigError as error:
        raise bad_checkpoint(folder, error, "") from error


def check_checkpoint(folder: Path, config: ModelConfig) -> CheckpointSummary:
    """Reads all headers and the tokenizer files; no weights."""
    try:
        source = Checkpoint.open(folder, config)
    except (CheckpointError, OSError) as error:
        raise bad_checkpoint(folder, error) from error
    try:
        Tokenizer.load(folder, config)
        return source.summary()
    except TokenizerError as error:
        raise bad_checkpoint(folder, error, "") from error
    finally:
        source.close()


def check_placement(config: ModelConfig, expert_actors: int) -> None:
    """Refused when an expert actor would have no expert."""
    if not expert_actors:
        return
    try:
        check_actors(config.num_experts, expert_actors)
    except PlacementError as error:
        raise Refused(ExitCode.USAGE, f"--expert-actors: {error}") from error


def check_slots(config: ModelConfig, expert_actors: int, slots: int | None) -> None:
    """Refused when so many slots cannot hold the experts, or could never be filled."""
    if slots is None:
        return
    if not expert_actors:
        raise Refused(ExitCode.USAGE, "--slots-per-actor: with --expert-actors 0 nothing has slots")
    least, most = even_share(config, expert_actors), config.num_experts
    if not least <= slots <= most:
        valid = f"{least} to {most}" if least < most else str(least)
        raise Refused(
            ExitCode.USAGE,
            f"--slots-per-actor {slots}: {expert_actors} expert actors share "
            f"{config.num_experts} experts per layer, valid numbers are {valid}",
        )


def check_recording(config: ModelConfig, file: Path | None) -> None:
    """Refused when the file is no recording, or one of another model."""
    if file is None:
        return
    from expertmesh.cluster.ledger.recording import RecordingError, load_recording_of

    try:
        load_recording_of(file, config.moe_layers, config.num_experts)
    except (RecordingError, OSError) as error:
        raise Refused(ExitCode.USAGE, f"--routing-record: {error}") from error


def check_kernels(choice: str, dtype: Dtype, here: bool) -> None:
    """dtype: as LoadSettings has it. here: whether this machine is the one that will serve; others'
    actors refuse by themselves. Raises Refused with the reason."""
    try:
        parse_choice(choice)
        if here:
            resolve(choice, *placed("auto", dtype))
    except KernelsUnavailable as error:
        hint = "`expertmesh doctor` prints who can serve each operator"
        raise Refused(ExitCode.USAGE, f"--kernels {choice}: {error}", hint) from error


def check_graphs(choice: Choice, kernels: str, here: bool) -> None:
    """here: as in check_kernels, which has passed. Raises Refused with the reason."""
    try:
        if here:
            wanted(choice, kernels, placed("auto", "auto")[0])
    except GraphsUnavailable as error:
        hint = "`--decode-graphs auto` records them where that can be"
        raise Refused(ExitCode.USAGE, f"--decode-graphs {choice}: {error}", hint) from error


def even_share(config: ModelConfig, expert_actors: int) -> int:
    """The fewest slots per actor and layer that hold every expert once."""
    return -(-config.num_experts // expert_actors)


def bad_checkpoint(
    folder: Path,
    error: Exception,
    hint: str = "copy the checkpoint again, or check it against its source",
) -> Refused:
    """The refusal of a checkpoint that can not be read, with its path once: some errors bring
    the path of the folder or of a file in it, others only a file's name."""
    text, place = str(error), str(folder)
    head, _, rest = text.partition(": ")
    while head.startswith(place) and rest.startswith(f"{head}: "):
        text = rest
        head, _, rest = text.partition(": ")
    if place not in text:
        text = f"{place}: {text}"
    return Refused(ExitCode.BAD_CHECKPOINT, text, hint)


def has_tokenizer(folder: Path) -> bool:
    return (folder / MODEL_FILE).exists()


def check_port(host: str, port: int, flag: str = "--port") -> None:
    """Refused with the owner's name when the address can not be listened on. flag: what sets it."""
    hold_port(host, port, flag).close()


def hold_port(host: str, port: int, flag: str = "--port") -> socket.socket:
    """The address, taken until the returned socket is closed; see `listener.hold`. Refused like
    `check_port`."""
    try:
        return hold(host, port)
    except socket.gaierror as error:
        raise Refused(ExitCode.PORT, f"the host {host} has no address: {error}") from error
    except PermissionError as error:
        raise Refused(
            ExitCode.PORT, f"port {port} needs more rights than this user has", "use 1024 or above"
        ) from error
    except OSError as error:
        raise _port_refusal(host, port, flag, error) from error


def check_tls(section: str, tls: TlsSettings | None) -> None:
    """Refused when no server can use these files. section: of the settings, "http" or "grpc"."""
    if tls is None:
        return
    try:
        tls.check()
    except (OSError, ValueError) as error:
        names = ", ".join(map(str, tls.files))
        raise Refused(ExitCode.USAGE, f"{section}.tls: {names}: {error}") from error


def _port_refusal(host: str, port: int, flag: str, error: OSError) -> Refused:
    if error.errno == errno.EADDRNOTAVAIL:
        hint = "pass an address of this machine with --host, or 0.0.0.0 for all of them"
        return Refused(ExitCode.PORT, f"{host} is not an address of this machine", hint)
    if error.errno != errno.EADDRINUSE:
        return Refused(ExitCode.PORT, f"port {port} on {host}: {error.strerror}")
    owner = port_owner(port)
    by = f" by {owner}" if owner else ""
    hint = f"stop that process, or choose another port with {flag}"
    return Refused(ExitCode.PORT, f"port {port} on {host} is taken{by} ({error.strerror})", hint)


def shm_warning(needed: int, folder: str = "/dev/shm") -> str:
    """What to tell where shared memory is too small for an object store of `needed` bytes; "" where
    it is not. Ray then keeps the store on disk. No request depends on it."""
    try:
        free = int(psutil.disk_usage(folder).free)
    except OSError:
        return ""
    if free >= needed:
        return ""
    return (
        f"{folder} has {free:,} bytes free and Ray's object store takes {needed:,}: it goes to "
        "/tmp instead. Give the container more, as with --shm-size=1g"
    )


def check_cluster(address: str) -> None:
    """Refused when nothing listens at HOST:PORT; Ray itself would try for minutes."""
    host, _, port = address.rpartition(":")
    if not port.isdigit():
        return  # "auto" and the like: Ray knows at once
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=5).close()
    except (OSError, OverflowError) as error:
        raise Refused(
            ExitCode.LAUNCH,
            f"no Ray cluster answers at {address}: {error}",
            "check `ray status` on its head node; --address takes the head's HOST:PORT",
        ) from error


def port_owner(port: int) -> str:
    """ "process 123 (name)" of who listens on the port, or "" when this user may not know."""
    try:
        for one in psutil.net_connections("tcp"):
            if one.laddr and one.laddr.port == port and one.status == psutil.CONN_LISTEN:
                if one.pid is None:
                    return ""
                return f"process {one.pid} ({psutil.Process(one.pid).name()})"
    except (psutil.Error, OSError):
        return ""
    return ""


def plan_memory(
    config: ModelConfig,
    summary: CheckpointSummary,
    load: LoadSettings,
    engine: EngineSettings,
    attention_replicas: int,
    expert_actors: int,
    slots: int = 0,
) -> MemoryPlan:
    """What a start would take, with all slots filled. Pure arithmetic over the headers.

    slots: per expert actor and layer.
    """
    wide = load.dtype != "bfloat16"  # auto is float32 wherever this machine's memory counts
    dtype_bytes = 4 if wide else 2
    holders = expert_actors or attention_replicas
    copies = expert_actors * slots / config.num_experts if expert_actors else attention_replicas
    decoded = summary.experts.parameters * dtype_bytes
    return MemoryPlan(
        attention=attention_replicas * summary.attention.parameters * dtype_bytes,
        experts=round(copies * summary.experts.total_bytes),
        expert_cache=min(holders * load.expert_cache_bytes, round(copies * decoded)),
        state=attention_replicas * state_bytes(config, engine, dtype_bytes),
        processes=(attention_replicas + expert_actors) * PROCESS_BYTES
        + (RAY_BYTES if attention_replicas + expert_actors > 1 else 0),
        host_cache=attention_replicas * host_bytes(config, engine, dtype_bytes),
        offloaded=attention_replicas * offloaded_bytes(config, engine, dtype_bytes),
    )


def _dtype(nbytes: int) -> torch.dtype:
    return torch.float32 if nbytes == 4 else torch.bfloat16


def state_bytes(config: ModelConfig, engine: EngineSettings, dtype_bytes: int) -> int:
    """Bytes of one replica's pages, slots and snapshots, on its device."""
    dtype = _dtype(dtype_bytes)
    slots = engine.slots + engine.state.places
    return engine.pages * bytes_per_page(config, dtype) + slots * bytes_per_slot(config, dtype)


def host_bytes(config: ModelConfig, engine: EngineSettings, dtype_bytes: int) -> int:
    """Most bytes of host memory that one replica caches in: never less, where there is a folder,
    than what is on its way there takes (see TieredStore)."""
    state = engine.state
    if state.disk is None:
        return state.host_bytes
    slot = bytes_per_slot(config, _dtype(dtype_bytes))
    return max(state.host_bytes, TRANSIT_BYTES, 2 * slot)


def offloaded_bytes(config: ModelConfig, engine: EngineSettings, dtype_bytes: int) -> int:
    """Most bytes of host memory that one replica's running sequences fill with pages that are off
    its device: requests may ask for that, whatever the mode of those that do not say."""
    layout = StateLayout.of(config, _dtype(dtype_bytes))
    if not layout.page[0]:
        return 0
    room, context = OffloadRoom(engine.state, layout), engine.max_context or config.max_position
    return min(room.capacity, engine.slots * room.far("select", context).nbytes)


def available_memory() -> int:
    """Bytes this process tree may still take: the machine's, or less where a cgroup says so."""
    free = int(psutil.virtual_memory().available)
    try:
        limit = Path("/sys/fs/cgroup/memory.max").read_text().strip()
        used = int(Path("/sys/fs/cgroup/memory.current").read_text())
    except (OSError, ValueError):
        return free
    return free if limit == "max" else min(free, max(int(limit) - used, 0))


def check_memory(plan: MemoryPlan, pages: int, available: int) -> None:
    """Refused when the plan exceeds what is available, with the parts that make it up."""
    if plan.total <= available:
        return
    parts = (
        f"attention weights {size_text(plan.attention)}, experts {size_text(plan.experts)}, "
        f"decoded experts {size_text(plan.expert_cache)}, state {size_text(plan.state)}, "
        f"host cache {size_text(plan.host_cache)}, old pages {size_text(plan.offloaded)}, "
        f"processes {size_text(plan.processes)}"
    )
    raise Refused(
        ExitCode.MEMORY,
        f"this start needs {size_text(plan.total)} and {size_text(available)} is available "
        f"({parts})",
        f"lower --kv-pages (now {pages} pages of {PAGE_TOKENS} tokens), --kv-snapshots, "
        "--max-running, --expert-cache-gb, --host-cache-gb, --kv-offload-gb or the number of "
        "actors, or use --dtype bfloat16",
    )


def size_text(count: int) -> str:
    """Bytes in the unit that shows more than zeros."""
    if count < 1e8:
        return f"{count / 1e6:.1f} MB"
    for unit, size in (("GB", 1e9), ("TB", 1e12), ("PB", 1e15), ("EB", 1e18)):
        if count < 1000 * size:
            return f"{count / size:.2f} {unit}"
    return "over 1000 EB"
