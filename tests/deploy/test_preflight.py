"""What a start checks, as plain functions."""

import os
import pickle
import signal
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from pydantic import ValidationError
from rich.console import Console
from starlette.types import Receive, Scope, Send

from expertmesh.actors.attention.settings import EngineSettings
from expertmesh.actors.model.checkpoint import CheckpointError
from expertmesh.actors.model.config import ConfigError, ModelConfig
from expertmesh.actors.model.loading import LoadSettings
from expertmesh.actors.state.item import StateLayout
from expertmesh.actors.state.model_state import bytes_per_page, bytes_per_slot
from expertmesh.actors.state.opening import open_tiers
from expertmesh.actors.state.settings import StateSettings
from expertmesh.cluster.launch import LaunchError
from expertmesh.cluster.ledger.recording import Recording
from expertmesh.deploy import one_process, preflight
from expertmesh.deploy.cli import BUNDLED
from expertmesh.deploy.edge_settings import HttpSettings
from expertmesh.deploy.exit_codes import ExitCode, Refused
from expertmesh.deploy.listener import bind, http_server
from expertmesh.deploy.preflight import MemoryPlan
from expertmesh.deploy.serve_app import DoorSettings, build_openai_app
from expertmesh.deploy.serve_command import _serve_here, run
from expertmesh.deploy.serve_console import announce
from expertmesh.deploy.serve_options import ServeOptions
from tests.support.http_server import free_port


def options(model: Path, **changes: object) -> ServeOptions:
    defaults: dict[str, object] = {
        "model": model, "expert_actors": 2, "attention_replicas": 1, "address": None, "name": "x",
        "host": "127.0.0.1", "port": 8000, "served_model_name": None,
        "grace_seconds": 1, "dtype": "auto", "max_model_len": None, "max_running": 4,
        "kv_pages": 8, "expert_cache_bytes": 1 << 30, "dry_run": False,
    }  # fmt: skip
    return ServeOptions(**(defaults | changes))  # type: ignore[arg-type]


def test_port_owner_is_named() -> None:
    with socket.socket() as owner:
        owner.bind(("127.0.0.1", 0))
        owner.listen()
        port = owner.getsockname()[1]
        with pytest.raises(Refused) as refused:
            preflight.check_port("127.0.0.1", port)
    assert refused.value.code is ExitCode.PORT
    assert str(port) in refused.value.message and str(os.getpid()) in refused.value.message
    preflight.check_port("127.0.0.1", port)  # free again, though just closed
    with pytest.raises(Refused, match="no address"):
        preflight.check_port("no.such.host.invalid", port)


def test_a_held_port_is_taken_but_the_door_may_listen() -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with preflight.hold_port("127.0.0.1", port):
        for _ in range(2):  # also beside a door that does not listen yet, and one that does
            with pytest.raises(Refused, match="taken") as refused:
                preflight.hold_port("127.0.0.1", port)
            assert refused.value.code is ExitCode.PORT
            with bind("127.0.0.1", port, shared=True) as door:
                with pytest.raises(Refused, match="taken"):
                    preflight.check_port("127.0.0.1", port)
                door.listen()
                with socket.create_connection(("127.0.0.1", port), timeout=5):
                    door.accept()[0].close()  # first: its side lingers in TIME_WAIT
    preflight.hold_port("127.0.0.1", port).close()  # a restart is not refused


def test_only_one_of_many_starts_gets_the_port() -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]

    def take() -> socket.socket | None:
        try:
            return preflight.hold_port("127.0.0.1", port)
        except Refused:
            return None

    with ThreadPoolExecutor(8) as pool:
        found = [one.result() for one in [pool.submit(take) for _ in range(16)]]
    holds = [one for one in found if one is not None]
    assert len(holds) == 1
    holds[0].close()


def test_a_refused_checkpoint_is_named_once(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    for error in (f"{file}: {file}: bad", f"{file}: bad", "config.json: bad"):
        message = preflight.bad_checkpoint(tmp_path, ValueError(error)).message
        assert message.count(str(tmp_path)) == 1 and message.endswith("config.json: bad")
    file.write_text('{"model_type": 3}')
    with pytest.raises(Refused) as refused:
        preflight.check_folder(tmp_path)
    assert refused.value.message.count(str(tmp_path)) == 1
    assert not preflight.has_tokenizer(tmp_path) and preflight.has_tokenizer(BUNDLED)


def test_an_address_of_another_machine_is_not_called_taken() -> None:
    with pytest.raises(Refused, match="not an address of this machine") as refused:
        preflight.hold_port("192.0.2.1", free_port())
    assert refused.value.code is ExitCode.PORT and "--host" in refused.value.hint


def test_sizes_are_not_shown_as_zero() -> None:
    sizes = [preflight.size_text(count) for count in (1_250_000, 2 * 10**8, 1.56e12, 10**16)]
    assert sizes == ["1.2 MB", "0.20 GB", "1.56 TB", "10.00 PB"]


def test_more_expert_actors_than_experts(checkpoint: Path) -> None:
    config = preflight.check_folder(checkpoint)
    preflight.check_placement(config, config.num_experts)
    with pytest.raises(Refused) as refused:
        run(options(checkpoint, expert_actors=config.num_experts + 1, dry_run=True))
    assert refused.value.code is ExitCode.USAGE
    assert f"1 to {config.num_experts}" in refused.value.message


@pytest.mark.parametrize("experts", [7, 12, 896])
@pytest.mark.parametrize("actors", [1, 2, 3, 5, 8])
def test_slots_that_cannot_be_are_refused_with_those_that_can(experts: int, actors: int) -> None:
    config = cast(ModelConfig, SimpleNamespace(num_experts=experts))
    if actors > experts:
        with pytest.raises(Refused, match=f"1 to {experts}"):
            preflight.check_placement(config, actors)
        return
    least = -(-experts // actors)
    for slots in (None, least, experts):
        preflight.check_slots(config, actors, slots)
    valid = f"{least} to {experts}" if least < experts else str(experts)
    for slots in (-1, 0, least - 1, experts + 1, 10_000):
        with pytest.raises(Refused, match=rf"--slots-per-actor {slots}: .* {valid}$") as refused:
            preflight.check_slots(config, actors, slots)
        assert refused.value.code is ExitCode.USAGE


def test_a_recording_must_be_one_of_this_model(checkpoint: Path, tmp_path: Path) -> None:
    config, file = preflight.check_folder(checkpoint), tmp_path / "traffic.npz"
    shape = len(config.moe_layers), config.num_experts
    fitting = Recording(
        config.moe_layers, config.num_experts, 2, 1.0, np.zeros(shape, np.int64),
        np.zeros((0, shape[0], 2), np.int16), np.zeros((shape[0], 0, shape[1]), bool), "m",
    )  # fmt: skip
    file.write_bytes(fitting.to_bytes())
    preflight.check_recording(config, file)
    assert options(checkpoint, routing_record=file).cluster(config, None).routing_record == file
    other = SimpleNamespace(moe_layers=config.moe_layers, num_experts=config.num_experts + 1)
    with pytest.raises(Refused, match=rf"{config.num_experts} experts in .* this one has"):
        preflight.check_recording(cast(ModelConfig, other), file)
    file.write_bytes(b"no archive")
    with pytest.raises(Refused, match="not a routing recording") as refused:
        run(options(checkpoint, routing_record=file, dry_run=True))
    assert refused.value.code is ExitCode.USAGE and str(file) in refused.value.message


def test_slots_without_expert_actors_are_refused(checkpoint: Path) -> None:
    with pytest.raises(Refused, match="--expert-actors 0"):
        run(options(checkpoint, expert_actors=0, slots_per_actor=4, dry_run=True))


def test_spare_slots_are_told_and_left_out_where_the_memory_is_short(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    config = preflight.check_folder(checkpoint)
    summary = preflight.check_checkpoint(checkpoint, config)
    chosen = options(checkpoint, dry_run=True, port=free_port())

    def needs(slots: int) -> int:
        load, engine = chosen.load(), chosen.engine(config)
        return preflight.plan_memory(config, summary, load, engine, 1, 2, slots).total

    def printed(available: int, **changes: object) -> str:
        monkeypatch.setattr(preflight, "available_memory", lambda: available)
        run(replace(chosen, **changes))  # type: ignore[arg-type]
        return " ".join(capsys.readouterr().err.split())

    every, half = config.num_experts, config.num_experts // 2
    text = printed(needs(every))
    assert f"{every} slots per actor" in text and "any one actor can be lost" in text
    text = printed(needs(every) - 1)
    assert f"hold {half} expert slots per actor, not the {every}" in text
    assert f"{half} slots per actor" in text and "has to be replaced first" in text
    text = printed(needs(half), slots_per_actor=half)
    assert "warning" not in text and "0 spare" in text
    for available, changes in (
        (needs(half) - 1, {}),
        (needs(every) - 1, {"slots_per_actor": every}),
    ):
        with pytest.raises(Refused) as refused:
            printed(available, **changes)
        assert refused.value.code is ExitCode.MEMORY


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"max_expert_actors": 1}, "--max-expert-actors 1: valid numbers are 2 to"),
        ({"max_expert_actors": 10_000}, "--max-expert-actors 10000: valid numbers are 2 to"),
        ({"max_expert_actors": 3, "min_expert_actors": 3}, "--min-expert-actors 3: .* 1 to 2"),
        ({"max_expert_actors": 3, "expert_actors": 0}, "no pool to scale"),
        ({"min_expert_actors": 1}, "--min-expert-actors needs --max-expert-actors"),
        ({"max_attention_replicas": 1, "attention_replicas": 2}, "--max-attention-.* 2 or more"),
        ({"min_attention_replicas": 1}, "needs --max-attention-replicas"),
        ({"autoscale_dry_run": True}, "needs a maximum"),
    ],
)
def test_impossible_limits_of_autoscaling(
    checkpoint: Path, changes: dict[str, object], text: str
) -> None:
    with pytest.raises(Refused, match=text) as refused:
        run(options(checkpoint, dry_run=True, **changes))
    assert refused.value.code is ExitCode.USAGE


def test_autoscaling_leaves_a_pool_without_a_maximum_alone(
    checkpoint: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = preflight.check_folder(checkpoint)
    assert options(checkpoint).cluster(config, None).autoscale is None
    one = options(checkpoint, max_attention_replicas=3, autoscale_dry_run=True, expert_actors=0)
    assert not one.one_process
    scaling = one.cluster(config, None).autoscale
    assert scaling is not None and scaling.experts is None and scaling.dry_run
    assert scaling.attention is not None
    assert (scaling.attention.min_replicas, scaling.attention.max_replicas) == (1, 3)
    run(replace(one, dry_run=True, port=free_port()))
    assert "1 to 3 attention replicas (dry run" in capsys.readouterr().err


def test_options_reach_the_mesh(checkpoint: Path) -> None:
    config = preflight.check_folder(checkpoint)
    chosen = options(checkpoint, hold_seconds=7.0, rebalance_seconds=0.0, max_expert_actors=3)
    chosen = replace(chosen, kernels="torch,sample=reference", decode_graphs="off")
    settings = chosen.cluster(config, 4)
    assert settings.load.kernels == "torch,sample=reference" and settings.engine.graphs == "off"
    assert (settings.recovery.hold_s, settings.rebalance.period_s) == (7.0, 0.0)
    assert settings.slots_per_actor == 4 and settings.slots(config.num_experts, 2) == 4


@pytest.mark.parametrize(
    ("choice", "message"),
    [
        ("cuda", "unknown kernel backend 'cuda'"),
        ("auto,sample=triton,glue=torch", "unknown operator 'glue'"),
        ("auto,pack_linear=triton", "triton cannot serve pack_linear: no Triton kernel"),
    ],
)
def test_kernels_that_cannot_serve_are_refused(choice: str, message: str, checkpoint: Path) -> None:
    with pytest.raises(Refused, match=message) as refused:
        run(options(checkpoint, kernels=choice))
    assert refused.value.code is ExitCode.USAGE and "doctor" in refused.value.hint


def test_the_interpreter_s_bfloat16_is_refused_before_the_start(checkpoint: Path) -> None:
    with pytest.raises(Refused, match=r"computes wrongly in torch.bfloat16: use float32"):
        run(options(checkpoint, kernels="auto,sample=triton", dtype="bfloat16"))


def test_kernels_of_other_machines_are_refused_by_their_actors() -> None:
    preflight.check_kernels("auto,pack_linear=triton", "auto", here=False)
    with pytest.raises(Refused, match="unknown operator"):
        preflight.check_kernels("auto,glue=torch", "auto", here=False)


def test_graphs_that_cannot_be_recorded_are_refused(checkpoint: Path) -> None:
    with pytest.raises(Refused, match="on: decode graphs cannot be recorded: the device is cpu"):
        run(options(checkpoint, decode_graphs="on"))
    preflight.check_graphs("on", "auto", here=False)


def test_dry_run_checks_the_port_and_warns_of_a_cut(
    checkpoint: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    port = free_port()
    run(options(checkpoint, dry_run=True, port=port, max_model_len=5000))
    printed = " ".join(capsys.readouterr().err.split())
    assert "warning: --max-model-len 5000 is cut to 512" in printed and "4096" in printed
    with preflight.hold_port("127.0.0.1", port), pytest.raises(Refused, match="taken"):
        run(options(checkpoint, dry_run=True, port=port))


@pytest.fixture(autouse=True)
def same_signal_handlers() -> Iterator[None]:
    """`run` and its parts set their own."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def test_a_start_that_found_damage_says_so_between_processes() -> None:
    for damaged in (True, False):
        error = pickle.loads(pickle.dumps(LaunchError("scale 255 in a.safetensors", damaged)))
        assert error.damaged is damaged and str(error) == "scale 255 in a.safetensors"


@pytest.mark.parametrize("problem", [CheckpointError("a.safetensors: scale 255"), ConfigError("x")])
def test_damage_found_while_reading_is_refused(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch, problem: Exception
) -> None:
    def damaged(*_: object) -> None:
        raise problem

    monkeypatch.setattr(one_process, "start_local", damaged)
    config = preflight.check_folder(checkpoint)
    chosen = options(checkpoint, expert_actors=0, port=free_port())
    with pytest.raises(Refused) as refused:
        _serve_here(Console(), chosen, config)
    assert refused.value.code is ExitCode.BAD_CHECKPOINT and str(problem) in refused.value.message


def test_the_printed_example_fits_the_checkpoint(checkpoint: Path, tmp_path: Path) -> None:
    console = Console(record=True, soft_wrap=True)
    announce(console, options(checkpoint), 0.0)
    announce(console, options(tmp_path), 0.0)
    text = console.export_text()
    assert '"prompt": "Once upon a time"' in text and '"prompt": [1, 2, 3]' in text


def test_memory_plan_counts_what_is_loaded(checkpoint: Path) -> None:
    config = preflight.check_folder(checkpoint)
    summary = preflight.check_checkpoint(checkpoint, config)
    load, engine = LoadSettings(model=checkpoint), EngineSettings(pages=16, slots=2)
    half = config.num_experts // 2
    one = preflight.plan_memory(config, summary, load, engine, 1, 2, half)
    two = preflight.plan_memory(config, summary, load, engine, 2, 2, half)
    spare = preflight.plan_memory(config, summary, load, engine, 1, 2, 2 * half)
    assert spare.experts == 2 * one.experts and spare.attention == one.attention
    local = preflight.plan_memory(config, summary, load, engine, 2, 0)
    assert one.attention == summary.attention.parameters * 4
    assert two.attention == 2 * one.attention and two.experts == one.experts
    assert local.experts == 2 * one.experts
    assert one.expert_cache == summary.experts.parameters * 4  # less than a cache may hold
    assert one.host_cache == engine.state.host_bytes and two.host_cache == 2 * one.host_cache
    assert one.offloaded == 0  # no request is that long
    assert one.total == sum(
        (one.attention, one.experts, one.expert_cache, one.state, one.host_cache, one.processes)
    )


def test_old_pages_of_running_requests_are_planned(checkpoint: Path) -> None:
    """As many as all slots may have off the device, or as there may be."""
    config = preflight.check_folder(checkpoint)
    summary = preflight.check_checkpoint(checkpoint, config)

    def planned(slots: int, **state: Any) -> int:
        settings = StateSettings(window_tokens=1024, **state)
        engine = EngineSettings(pages=16, slots=slots, max_context=3200, state=settings)
        load = LoadSettings(model=checkpoint)
        two = preflight.plan_memory(config, summary, load, engine, 2, 0)
        assert two.total == replace(two, offloaded=0).total + two.offloaded
        return two.offloaded

    page = bytes_per_page(config, torch.float32)
    far = (3200 - 1024) // 64 - 1
    assert planned(3) == 2 * 3 * far * page
    assert planned(300, offload_bytes=10_000_000) == 2 * 10_000_000
    assert planned(3, offload_bytes=0) == 0
    assert planned(3, codec="int8") > planned(3)


def test_with_a_folder_memory_holds_what_is_on_its_way_there(
    checkpoint: Path, tmp_path: Path
) -> None:
    """As much as the tier itself takes."""
    config = preflight.check_folder(checkpoint)
    for size in (0, 20_000_000, 200_000_000):
        state = StateSettings(host_bytes=size, disk=tmp_path / str(size), disk_bytes=1 << 30)
        store = open_tiers(StateLayout.of(config, torch.float32), state, lambda: None)
        assert store is not None
        held = store.stats().host.capacity_bytes
        store.close()
        engine = EngineSettings(pages=16, slots=2, state=state)
        assert preflight.host_bytes(config, engine, 4) == held == max(size, 64 << 20)
    bare = EngineSettings(pages=16, slots=2, state=StateSettings(host_bytes=20_000_000))
    assert preflight.host_bytes(config, bare, 4) == 20_000_000


def test_snapshots_are_state_where_something_is_cached(checkpoint: Path) -> None:
    config = preflight.check_folder(checkpoint)

    def state(**settings: Any) -> int:
        engine = EngineSettings(pages=16, slots=2, state=StateSettings(**settings))
        return preflight.state_bytes(config, engine, 4)

    slot = bytes_per_slot(config, torch.float32)
    assert state(snapshots=5) - state(prefix_cache=False) == 5 * slot > 0


def test_memory_refusal_has_the_numbers() -> None:
    plan = MemoryPlan(10**9, 2 * 10**9, 0, 3 * 10**9, 0)
    preflight.check_memory(plan, 512, 6 * 10**9)
    with pytest.raises(Refused) as refused:
        preflight.check_memory(plan, 512, 5 * 10**9)
    assert refused.value.code is ExitCode.MEMORY
    assert "6.00 GB" in refused.value.message and "5.00 GB" in refused.value.message
    assert "512" in refused.value.hint and "--kv-snapshots" in refused.value.hint


def test_context_is_what_the_pages_hold(checkpoint: Path) -> None:
    config = preflight.check_folder(checkpoint)
    assert config.max_position == 4096
    assert options(checkpoint).context(config) == 8 * 64
    assert options(checkpoint, kv_pages=512).context(config) == 4096
    assert options(checkpoint, kv_pages=512, max_model_len=100).context(config) == 100
    assert options(checkpoint).served_name == "tiny"
    assert options(checkpoint, expert_actors=0).one_process
    assert not options(checkpoint, expert_actors=0, attention_replicas=2).one_process


def test_bundled_model_passes_its_checks() -> None:
    config = preflight.check_folder(BUNDLED)
    summary = preflight.check_checkpoint(BUNDLED, config)
    assert config.family == "kimi_k3" and summary.packed_matrices > 0


def test_idle_connections_outlive_client_pools() -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None: ...

    assert http_server(app, 1).config.timeout_keep_alive > 75
    settings = HttpSettings(idle_seconds=300)
    assert http_server(app, 1, http=settings).config.timeout_keep_alive == 300


def test_serve_arguments_are_strict(checkpoint: Path) -> None:
    mesh = {"load": {"model": str(checkpoint)}, "expert_actors": 1}
    assert build_openai_app({"mesh": mesh})
    for bad in ({"mesh": mesh, "typo": 1}, {"mesh": mesh | {"expert_actor": 2}}, {}):
        with pytest.raises(ValidationError):
            build_openai_app(bad)
    with pytest.raises(ValidationError):
        DoorSettings(model=checkpoint, mesh="a", namespace="n", port=0)


class TestSharedMemory:
    def test_enough_needs_no_word(self) -> None:
        assert preflight.shm_warning(1) == ""
        assert preflight.shm_warning(1 << 60, "/no/such/folder") == ""

    def test_too_little_is_told_in_numbers(self, monkeypatch: pytest.MonkeyPatch) -> None:
        class Usage:
            free = (128 << 20) - 4096  # a few bytes short is short

        monkeypatch.setattr(preflight.psutil, "disk_usage", lambda folder: Usage)
        assert preflight.shm_warning(Usage.free) == ""
        assert preflight.shm_warning(128 << 20).startswith(
            "/dev/shm has 134,213,632 bytes free and Ray's object store takes 134,217,728"
        )
