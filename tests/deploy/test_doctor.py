"""`expertmesh doctor`: every judgement on made-up facts, and one real run."""

import json
import os
import resource
import socket
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from expertmesh.actors.exchange.base import ExchangeError
from expertmesh.cluster.settings import OBJECT_STORE_BYTES
from expertmesh.deploy.cli import BUNDLED, app
from expertmesh.deploy.doctor import exchange_test, machine, model, network, ray_probe, software
from expertmesh.deploy.doctor.findings import Finding
from expertmesh.deploy.doctor.network import Interface, judge_interfaces, nccl_takes
from expertmesh.deploy.exit_codes import ExitCode
from expertmesh.kernels.registry import OPERATORS, OperatorSupport
from tests.support.checkpoints import write_checkpoint
from tests.support.tampering import shards_of

ETHERNET = Interface("eth0", ("10.0.0.5",), speed=100_000)
LOOPBACK = Interface("lo", ("127.0.0.1",))


def named(findings: list[Finding], name: str) -> Finding:
    (one,) = [one for one in findings if one.name == name]
    return one


def test_a_real_run_as_json() -> None:
    done = CliRunner().invoke(app, ["doctor", "--json", "--model", str(BUNDLED)])
    report = json.loads(done.stdout)
    findings = [Finding(**one) for one in report["findings"]]
    failed = [one for one in findings if one.status == "fail"]
    assert failed == [] and report["ok"] and done.exit_code == 0
    assert all(one.advice for one in findings if one.status != "ok")
    assert report["operators"]["attn_res_mix"]["torch"] == "available"
    assert report["operators"]["pack_linear"]["triton"].startswith("no Triton kernel: ")
    assert set(report["chosen"]) == set(report["operators"]) == set(OPERATORS)
    assert set(report["chosen"].values()) == {"torch"}
    assert [trip["layout"] for trip in report["exchange"]] == ["direct", "exact", "padded"]
    assert all(0 < trip["median_s"] <= trip["p99_s"] for trip in report["exchange"])
    assert {one.name for one in findings} >= {"Python", "torch", "ray", "/dev/shm", "open files"}


def test_a_terminal_gets_tables_and_failures_an_exit_code(tmp_path: Path) -> None:
    arguments = ["doctor", "--no-exchange", "--model", str(tmp_path / "nowhere")]
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == ExitCode.FAILED
    assert "1 failed" in done.stdout
    (row,) = [line for line in done.stdout.splitlines() if " pack_linear " in line]
    assert row.replace("│", " ").split() == ["pack_linear", "torch", "yes", "yes", "no", "(1)"]
    assert "(1) no Triton kernel: a dense matmul" in done.stdout


class TestMachine:
    def test_the_quota_and_the_limit_of_both_kinds_of_cgroup(self, tmp_path: Path) -> None:
        assert machine.cpu_quota(tmp_path) is None and machine.memory_limit(tmp_path) is None
        (tmp_path / "cpu").mkdir()
        (tmp_path / "memory").mkdir()
        (tmp_path / "cpu/cpu.cfs_quota_us").write_text("150000\n")
        (tmp_path / "cpu/cpu.cfs_period_us").write_text("100000\n")
        (tmp_path / "memory/memory.limit_in_bytes").write_text("9223372036854771712\n")
        assert machine.cpu_quota(tmp_path) == 1.5 and machine.memory_limit(tmp_path) is None
        (tmp_path / "cpu.max").write_text("max 100000\n")
        (tmp_path / "memory.max").write_text("1048576\n")
        assert machine.cpu_quota(tmp_path) is None and machine.memory_limit(tmp_path) == 1048576

    @pytest.mark.parametrize(
        ("free", "gpus", "status"),
        [
            (64 << 20, 0, "warn"),  # a container's default
            (OBJECT_STORE_BYTES, 0, "warn"),  # as large as the store is too small
            (OBJECT_STORE_BYTES + (16 << 20) - 4096, 0, "warn"),
            (1 << 30, 0, "ok"),
            (1 << 30, 8, "warn"),
            (16 << 30, 8, "ok"),
        ],
    )
    def test_shared_memory(self, free: int, gpus: int, status: str) -> None:
        found = machine.judge_shared_memory(free, free, gpus)
        assert found.status == status
        assert ("--shm-size" in found.advice) == (status == "warn")

    def test_no_shared_memory(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(machine, "SHM", tmp_path / "none")
        assert named(list(machine.check_machine(0)), "/dev/shm").status == "fail"

    def test_too_few_open_files(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(resource, "getrlimit", lambda kind: (1024, 4096))
        found = list(machine.check_machine(0))
        assert named(found, "open files").status == "warn"
        assert "65536" in named(found, "open files").advice
        assert named(found, "locked memory").status == "ok"
        assert named(list(machine.check_machine(1)), "locked memory").status == "warn"

    def test_threads_and_cores(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        monkeypatch.setattr(machine, "CGROUP", tmp_path)
        (tmp_path / "cpu.max").write_text("50000 100000")
        monkeypatch.setenv("OMP_NUM_THREADS", "4096")
        monkeypatch.setattr(os, "getloadavg", lambda: (1e6, 0.0, 0.0))
        monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "DEFAULT")
        found = list(machine.check_machine(0))
        for name in ("threads", "CPU quota", "load", "CPU kernels"):
            assert named(found, name).status == "warn", name


class TestSoftware:
    @staticmethod
    def table(reason: str) -> list[OperatorSupport]:
        return [
            OperatorSupport("glu", "triton", reason, chosen=not reason),
            OperatorSupport("glu", "torch", chosen=bool(reason)),
        ]

    @pytest.mark.parametrize(
        ("gpu", "reason", "status"),
        [(True, "", "ok"), (True, "triton is not installed", "warn"), (False, "no GPU", "ok")],
    )
    def test_operators(
        self, gpu: bool, reason: str, status: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu)
        monkeypatch.setattr(software, "operator_support", lambda device: self.table(reason))
        _, found = software.check_operators()
        assert found.status == status and found.value == f"1 by {'torch' if reason else 'triton'}"

    @pytest.mark.parametrize(("why_no", "status"), [("", "ok"), ("glu would ask the host", "warn")])
    def test_graphs_and_the_interpreter(
        self, why_no: str, status: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        (slow,) = software.check_kernels()
        assert slow.name == "TRITON_INTERPRET" and slow.status == "warn"
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(software, "interpreted", lambda: False)
        monkeypatch.setattr(software, "why_no_graphs", lambda choice, device: why_no)
        (found,) = software.check_kernels()
        assert found.name == "CUDA graphs" and found.status == status and why_no in found.value

    def test_an_operator_that_nothing_serves(self, monkeypatch: pytest.MonkeyPatch) -> None:
        broken = [
            OperatorSupport("glu", "triton", "no GPU"),
            OperatorSupport("glu", "torch", "ImportError: libgomp", chosen=True),
            OperatorSupport("mix", "torch", "ImportError: libgomp"),
        ]
        monkeypatch.setattr(software, "operator_support", lambda device: broken)
        _, found = software.check_operators()
        assert found.status == "fail" and found.value.endswith("none for mix, glu")

    def test_a_version_that_does_not_fit_and_one_that_is_missing(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        asked = ["torch==1.0", "no-such-package>=2", 'pytest>=99; extra == "dev"']
        monkeypatch.setattr(software, "requires", lambda name: asked)
        found = list(software.check_software())
        assert (
            named(found, "torch").status == "fail" and "torch==1.0" in named(found, "torch").advice
        )
        assert named(found, "no-such-package").value == "not installed"
        assert sum(one.status == "fail" for one in found) == 2

    def test_a_driver_whose_devices_torch_does_not_see(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        (tool := tmp_path / "nvidia-smi").write_text("#!/bin/sh\necho 570.10\necho 570.10\n")
        tool.chmod(0o755)
        monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
        (found,) = software.check_devices()
        assert found.status == "fail" and "570.10, 2 GPUs" in found.value


class TestNetwork:
    def test_a_taken_port_and_its_owner(self) -> None:
        with socket.socket() as owner:
            owner.bind(("127.0.0.1", 0))
            owner.listen()
            port = owner.getsockname()[1]
            found = network.port_state(port, "HTTP")
            assert found.status == "warn" and str(os.getpid()) in found.value
        assert network.port_state(port, "HTTP").status == "ok"

    def test_the_exchange_takes_the_interface_of_the_nodes_address(self) -> None:
        found = list(judge_interfaces([LOOPBACK, ETHERNET], "10.0.0.5", {}))
        assert named(found, "exchange").value == "eth0 (10.0.0.5)"
        assert all(one.status == "ok" for one in found)

    def test_an_address_that_is_nowhere(self) -> None:
        found = list(judge_interfaces([LOOPBACK, ETHERNET], "10.9.9.9", {}))
        assert named(found, "exchange").status == "fail"

    def test_a_slow_interface(self) -> None:
        slow = Interface("wlan0", ("10.0.0.6",), speed=300)
        found = list(judge_interfaces([LOOPBACK, ETHERNET, slow], "10.0.0.6", {}))
        assert named(found, "exchange").status == "warn"

    def test_variables_that_name_another_interface(self) -> None:
        asked = {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "ib"}
        found = list(judge_interfaces([LOOPBACK, ETHERNET], "10.0.0.5", asked))
        assert named(found, "GLOO_SOCKET_IFNAME").status == "warn"
        assert named(found, "NCCL_SOCKET_IFNAME").status == "fail"
        asked = {"GLOO_SOCKET_IFNAME": "eth0", "NCCL_SOCKET_IFNAME": "=eth0,eth1"}
        found = list(judge_interfaces([LOOPBACK, ETHERNET], "10.0.0.5", asked))
        assert all(one.status == "ok" for one in found)

    @pytest.mark.parametrize(
        ("asked", "taken"),
        [("eth", True), ("eth1", False), ("=eth", False), ("=eth0", True), ("^eth", False),
         ("^=eth", True), ("^docker,lo", True), ("ib,eth", True)],
    )  # fmt: skip
    def test_nccls_rule(self, asked: str, taken: bool) -> None:
        assert nccl_takes(asked, "eth0") is taken


class TestModel:
    def test_one_that_does_not_fit_and_a_broken_one(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        folder = write_checkpoint(tmp_path / "tiny", num_hidden_layers=4)
        monkeypatch.setattr(model.preflight, "available_memory", lambda: 1000)
        assert named(list(model.check_model(folder)), "memory").status == "warn"
        os.truncate(shards_of(folder)[0], 100)
        assert named(list(model.check_model(folder)), "tiny").status == "fail"


class TestExchange:
    def test_a_layout_that_fails_is_told_and_nothing_is_left(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def lost(address: object, epoch: int, layout: str) -> Any:
            raise ExchangeError(1, -1, "join", -1, "nobody came")

        monkeypatch.setattr(exchange_test, "measure", lost)
        trips, (found,) = exchange_test.check_exchange()
        assert trips == [] and found.status == "fail" and "nobody came" in found.value

    def test_a_wrong_sum_is_a_failure(self, monkeypatch: pytest.MonkeyPatch) -> None:
        class Other(exchange_test.EchoBank):
            def partial_sum(self, *args: Any) -> torch.Tensor:
                return super().partial_sum(*args) + 1

        monkeypatch.setattr(exchange_test, "EchoBank", Other)  # of this process only
        trips, (found,) = exchange_test.check_exchange()
        assert trips == [] and "wrong" in found.value


class TestRay:
    def test_nobody_there(self) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            address = f"127.0.0.1:{probe.getsockname()[1]}"
        (found,) = ray_probe.check_ray(address)
        assert found.status == "fail" and "no Ray cluster" in found.value

    def test_what_the_nodes_have(self) -> None:
        node = {"Alive": True, "NodeManagerHostname": "one", "Resources": {"CPU": 4.0, "GPU": 1.0}}
        found = list(ray_probe.nodes("auto", [node, {"Alive": False}]))
        assert found[0].value == "1 nodes alive, 1 dead"
        assert found[1].value == "4 CPU, 1 GPU, 0.0 GB"
        (none,) = ray_probe.nodes("auto", [{"Alive": False}])
        assert none.status == "fail"
