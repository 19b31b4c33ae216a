"""Options of cached state: from the command line to the engine's settings, and their refusals."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from pydantic import ValidationError
from rich.console import Console
from typer.testing import CliRunner

from expertmesh.actors.model.config import ModelConfig
from expertmesh.actors.state.opening import SECRET
from expertmesh.actors.state.settings import StateSettings
from expertmesh.cluster.settings import ClusterSettings
from expertmesh.deploy import preflight, serve_command, state_checks
from expertmesh.deploy.cli import app
from expertmesh.deploy.exit_codes import ExitCode, Refused
from expertmesh.deploy.serve_console import print_plan
from expertmesh.deploy.serve_options import ServeOptions
from expertmesh.deploy.state_checks import check_kv_mode, check_state_folder

GIB = 1 << 30
Serve = Callable[..., ServeOptions]


@pytest.fixture
def serve(monkeypatch: pytest.MonkeyPatch) -> Serve:
    """Runs `expertmesh serve` up to its options; fails with its output."""
    taken: list[ServeOptions] = []
    monkeypatch.setattr(serve_command, "run", taken.append)

    def run(*flags: str, env: dict[str, str] | None = None) -> ServeOptions:
        taken.clear()
        result = CliRunner().invoke(app, ["serve", *flags], env=env)
        assert taken, f"{result.exit_code}: {result.output}"
        return taken[0]

    return run


class TestFlags:
    def test_by_default_memory_is_used_and_no_disk(self, serve: Serve) -> None:
        state = serve().state()
        assert state.prefix_cache and state.disk is None and state.kv_mode == "exact"
        assert state == StateSettings(host_bytes=250_000_000, offload_bytes=250_000_000)

    def test_each_reaches_the_engine(self, serve: Serve, tmp_path: Path) -> None:
        options = serve(
            "--no-prefix-cache", "--kv-snapshots", "3", "--host-cache-gb", "1.5", "--state-dir",
            str(tmp_path), "--state-dir-gb", "2", "--kv-mode", "select", "--kv-codec", "int8",
            "--kv-window", "1024", "--kv-select-pages", "9", "--sessions-per-tenant", "5",
            "--session-ttl-seconds", "60", "--kv-offload-gb", "0.75", "--kv-sinks", "128",
            "--kv-select-mass", "0.9", "--kv-checkpoint-tokens", "512", "--kv-read-seconds", "0.5",
            "--state-dir-mb-per-s", "7.5", "--kv-offload-disk-gb", "4",
        )  # fmt: skip
        config = preflight.check_folder(options.model)
        assert options.cluster(config, None).engine.state == StateSettings(
            prefix_cache=False, snapshots=3, host_bytes=1_500_000_000, disk=tmp_path,
            disk_bytes=2_000_000_000, kv_mode="select", codec="int8",
            window_tokens=1024, select_pages=9, sessions_per_tenant=5, session_ttl_s=60,
            offload_bytes=750_000_000, offload_disk_bytes=4_000_000_000, sink_tokens=128,
            select_mass=0.9, checkpoint_tokens=512, read_timeout_s=0.5, write_bytes_per_s=7_500_000,
        )  # fmt: skip

    def test_also_as_variables_and_in_a_file(self, serve: Serve, tmp_path: Path) -> None:
        file = tmp_path / "serve.yaml"
        file.write_text("prefix-cache: false\nhost_cache_gb: 0\nkv_mode: offload\n")
        file.write_text(file.read_text() + "sessions_per_tenant: 3\nsession_ttl_seconds: 9\n")
        file.write_text(file.read_text() + "kv_select_mass: 0.5\nkv-sinks: 256\n")
        state = serve("--config", str(file), env={"EXPERTMESH_SERVE_KV_MODE": "select"}).state()
        assert (state.prefix_cache, state.host_bytes, state.kv_mode) == (False, 0, "select")
        assert (state.sessions_per_tenant, state.session_ttl_s) == (3, 9)
        assert (state.select_mass, state.sink_tokens) == (0.5, 256)

    def test_a_folder_means_the_same_everywhere(self, serve: Serve) -> None:
        assert (
            serve("--state-dir", "state", "--state-dir-gb", "1").state_dir
            == Path("state").absolute()
        )

    @pytest.mark.parametrize(
        ("flags", "message"),
        [
            (["--kv-mode", "lossy"], "must be exact, offload or select"),
            (["--kv-codec", "int2"], "must be raw, lossless, int8 or int4"),
            (["--kv-window", "100"], "100 must be a multiple of 64"),
            (["--kv-sinks", "65"], "--kv-sinks: 65 must be a multiple of 64"),
            (["--kv-checkpoint-tokens", "100"], "100 must be a multiple of 64"),
            (["--kv-select-mass", "0"], "--kv-select-mass: 0.0 must be above 0"),
            (["--kv-select-mass", "1.1"], "less than or equal to 1"),
            (["--kv-read-seconds", "nan"], "--kv-read-seconds: nan must be above 0 and finite"),
            (["--state-dir-mb-per-s", "inf"], "--state-dir-mb-per-s: inf must be above 0"),
            (["--kv-snapshots", "0"], "greater than or equal to 1"),
            (["--host-cache-gb", "-1"], "greater than or equal to 0"),
            (["--host-cache-gb", "inf"], "--host-cache-gb: inf must be a finite number"),
            (["--host-cache-gb", "nan"], "--host-cache-gb"),
            (["--state-dir-gb", "inf"], "--state-dir-gb: inf must be a finite number"),
            (["--expert-cache-gb", "1e308"], "--expert-cache-gb: 1e+308 must be a finite number"),
            (["--sessions-per-tenant", "0"], "greater than or equal to 1"),
            (["--session-ttl-seconds", "0"], "greater than or equal to 1"),
        ],
    )
    def test_wrong_values_are_named(self, flags: list[str], message: str) -> None:
        result = CliRunner().invoke(app, ["serve", *flags], env={"COLUMNS": "200"})
        assert result.exit_code == 2 and message in " ".join(result.output.split())

    @pytest.mark.parametrize(
        ("flags", "message"),
        [
            (["--state-dir", "x"], "--state-dir needs --state-dir-gb"),
            (["--state-dir-gb", "1"], "--state-dir-gb needs --state-dir"),
            (["--kv-offload-disk-gb", "1"], "--kv-offload-disk-gb needs --state-dir"),
            (["--state-dir", "x", "--state-dir-gb", "0.01"], "at least 0.0671"),
            (["--state-dir", "x", "--state-dir-gb", "0"], "at least 0.0671"),
        ],
    )
    def test_a_folder_needs_a_limit_and_some_room(
        self, serve: Serve, flags: list[str], message: str
    ) -> None:
        options = serve(*flags)
        with pytest.raises(Refused, match=message) as refused:
            options.engine(preflight.check_folder(options.model))
        assert refused.value.code is ExitCode.USAGE

    @pytest.mark.parametrize("codec", ["int8", "int4"])
    def test_what_loses_precision_needs_a_folder_that_has_the_rest(
        self, serve: Serve, codec: str, tmp_path: Path
    ) -> None:
        config = preflight.check_folder(serve().model)
        lossy = ("--kv-codec", codec, "--kv-mode", "select")
        message = f"--kv-codec {codec} needs --state-dir"
        with pytest.raises(Refused, match=message) as refused:
            serve(*lossy).engine(config)
        assert refused.value.code is ExitCode.USAGE and "--host-cache-gb 0" in refused.value.hint
        assert serve(*lossy, "--state-dir", str(tmp_path), "--state-dir-gb", "1").engine(config)
        assert serve(*lossy, "--host-cache-gb", "0").engine(config)
        # Also where settings come from a file of Ray Serve.
        engine = {"state": {"codec": codec}}
        with pytest.raises(ValidationError, match=rf"engine\.state\.codec {codec} needs"):
            ClusterSettings.model_validate({"load": {"model": tmp_path}, "engine": engine})

    def test_a_refusal_ends_the_command_before_anything_starts(self) -> None:
        result = CliRunner().invoke(app, ["serve", "--kv-codec", "int4"])
        assert result.exit_code == ExitCode.USAGE
        assert "error: --kv-codec int4 needs --state-dir" in result.output

    def test_a_request_may_be_longer_than_the_pages_where_old_ones_leave(
        self, serve: Serve
    ) -> None:
        config = preflight.check_folder(serve().model)
        assert config.max_position == 8192
        for mode, context in (("exact", 64 * 64), ("offload", 8192), ("select", 8192)):
            options = serve("--kv-pages", "64", "--kv-mode", mode)
            assert options.context(config) == options.engine(config).max_context == context
            options = serve("--kv-pages", "64", "--kv-mode", mode, "--max-model-len", "5000")
            assert options.context(config) == min(context, 5000)

    def test_what_a_long_request_keeps_on_the_device_must_fit(self, serve: Serve) -> None:
        def check(*flags: str) -> None:
            options = serve(*flags)
            config = preflight.check_folder(options.model)
            check_kv_mode(config, options.engine(config), torch.float32)

        check("--kv-pages", "8")
        check("--kv-pages", "8", "--kv-mode", "offload", "--max-model-len", "512")
        check("--kv-pages", "80", "--kv-mode", "offload")
        with pytest.raises(Refused, match="longer than --kv-pages 64 keeps") as refused:
            check("--kv-pages", "64", "--kv-mode", "offload")
        assert "--kv-window (now 4096 tokens)" in refused.value.hint
        check("--kv-pages", "64", "--kv-mode", "offload", "--kv-window", "1024")
        small = ("--kv-mode", "offload", "--kv-offload-gb", "0.001")
        with pytest.raises(Refused, match=r"8192 tokens alone has 4\.1 MB") as refused:
            check("--kv-pages", "80", *small)
        assert "--max-model-len" in refused.value.hint
        check("--kv-pages", "128", *small)  # then they stay on the device

    def test_a_model_without_old_pages_reads_them_exactly(self, serve: Serve) -> None:
        options = serve("--kv-mode", "select")
        config = preflight.check_folder(options.model)
        linear = config.model_copy(update={"kda_layers": tuple(range(config.num_layers))})
        with pytest.raises(Refused, match="has no MLA layers"):
            check_kv_mode(linear, options.engine(config), torch.float32)

    def test_the_plan_tells_where_state_is_kept(self, serve: Serve, tmp_path: Path) -> None:
        def plan(*flags: str) -> str:
            options, console = serve(*flags), Console(record=True, soft_wrap=True, quiet=True)
            config = preflight.check_folder(options.model)
            console = Console(record=True, soft_wrap=True, width=400)
            print_plan(console, options, config, preflight.check_checkpoint(options.model, config))
            return console.export_text()

        assert "16 snapshots on the device, 0.25 GB of host memory per replica, lossless" in plan()
        assert "cache     off" in plan("--no-prefix-cache")
        text = plan("--state-dir", str(tmp_path), "--state-dir-gb", "3", "--kv-mode", "offload")
        assert f"3.00 GB in {tmp_path}, lossless; old tokens: offload" in text
        folder = ("--state-dir", str(tmp_path), "--state-dir-gb", "3")
        assert "67.1 MB of host memory" in plan(*folder, "--host-cache-gb", "0.02")
        assert "host memory" not in plan("--host-cache-gb", "0")

    def test_a_limit_beyond_the_disk_is_warned_of(self, tmp_path: Path) -> None:
        flags = ["--state-dir", str(tmp_path), "--state-dir-gb", "999999", "--dry-run"]
        result = CliRunner().invoke(app, ["serve", "--expert-actors", "0", "--port", "1", *flags])
        assert "warning: --state-dir-gb 999999: the disk of" in result.output, result.output


class Usage(NamedTuple):
    total: int
    used: int
    free: int


class TestFolder:
    @pytest.fixture
    def config(self, checkpoint: Path) -> ModelConfig:
        return preflight.check_folder(checkpoint)

    def look(
        self, folder: Path, config: ModelConfig, limit: int = GIB, context: int = 512, old: int = 0
    ) -> str:
        settings = StateSettings(disk=folder, disk_bytes=limit, offload_disk_bytes=old)
        return check_state_folder(settings, config, context, torch.float32)

    def test_nothing_is_made(self, config: ModelConfig, tmp_path: Path) -> None:
        assert self.look(tmp_path / "a" / "b", config) == ""
        assert list(tmp_path.iterdir()) == []
        assert check_state_folder(StateSettings(), config, 512, torch.float32) == ""

    def test_a_file_is_no_folder(self, config: ModelConfig, tmp_path: Path) -> None:
        (tmp_path / "a").touch()
        for folder in (tmp_path / "a", tmp_path / "a" / "b"):
            with pytest.raises(Refused, match="is no folder"):
                self.look(folder, config)
        (tmp_path / "link").symlink_to(tmp_path / "nowhere")
        with pytest.raises(Refused, match="is no folder"):
            self.look(tmp_path / "link", config)

    def test_a_folder_must_be_writable(
        self, config: ModelConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Asked of the system: root may write where permissions say otherwise."""
        asked: list[tuple[Any, int]] = []

        def access(path: Any, mode: int) -> bool:
            asked.append((path, mode))
            return False

        monkeypatch.setattr(state_checks.os, "access", access)
        with pytest.raises(Refused, match="cannot be written to"):
            self.look(tmp_path / "a", config)
        assert asked == [(tmp_path, os.W_OK | os.X_OK)]

    def test_what_the_system_does_not_take_is_not_writable(self, config: ModelConfig) -> None:
        with pytest.raises(Refused, match="/proc/nothere: /proc cannot be written to"):
            self.look(Path("/proc/nothere"), config)

    def test_a_secret_must_be_long(
        self, config: ModelConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv(SECRET, "x" * 16)
        assert self.look(tmp_path, config) == ""
        monkeypatch.setenv(SECRET, "x" * 15)
        with pytest.raises(Refused, match=f"{SECRET} has 15 bytes") as refused:
            self.look(tmp_path, config)
        assert "xxx" not in refused.value.message

    def test_one_request_must_fit(self, config: ModelConfig, tmp_path: Path) -> None:
        with pytest.raises(Refused, match="a request of 4194304 tokens alone has") as refused:
            self.look(tmp_path, config, limit=64 << 20, context=1 << 22)
        assert "--max-model-len" in refused.value.hint

    def test_its_disk_must_have_room(
        self, config: ModelConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """What the folder takes already is its own."""
        monkeypatch.setattr(shutil, "disk_usage", lambda place: Usage(GIB, GIB, 0))
        with pytest.raises(Refused, match=r"its disk has 0\.0 MB left"):
            self.look(tmp_path, config)
        (tmp_path / "sub").mkdir()
        (tmp_path / "sub" / "segment").write_bytes(bytes(8 << 20))
        assert "has 8.4 MB left for it" in self.look(tmp_path, config)
        monkeypatch.setattr(shutil, "disk_usage", lambda place: Usage(GIB, 0, GIB))
        assert self.look(tmp_path, config) == ""
        found = self.look(tmp_path, config, old=GIB)
        assert "--kv-offload-disk-gb 1.07374: the disk of" in found
