"""Ports, network interfaces, and which of them the exchange uses."""

import os
import socket
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import psutil

from expertmesh.deploy.doctor.findings import Finding, judged
from expertmesh.deploy.listener import hold
from expertmesh.deploy.preflight import port_owner

SECTION = "network"
PORTS = {8000: "HTTP", 6379: "Ray's head", 50051: "gRPC"}
# Between two hosts of a mesh a message per layer and step; below this the cable decides.
FAST_MBIT = 10_000


@dataclass(frozen=True, slots=True)
class Interface:
    """speed: Mbit/s, 0 where the driver does not say."""

    name: str
    addresses: tuple[str, ...]
    up: bool = True
    mtu: int = 1500
    speed: int = 0


def check_network() -> Iterator[Finding]:
    for port, use in PORTS.items():
        yield port_state(port, use)
    yield from judge_interfaces(own_interfaces(), node_address(), os.environ)


def own_interfaces() -> list[Interface]:
    stats, found = psutil.net_if_stats(), []
    for name, entries in psutil.net_if_addrs().items():
        kinds = (socket.AF_INET, socket.AF_INET6)
        ips = tuple(entry.address for entry in entries if entry.family in kinds)
        if one := stats.get(name):
            found.append(Interface(name, ips, one.isup, one.mtu, one.speed))
    return found


def port_state(port: int, use: str) -> Finding:
    name = f"port {port} ({use})"
    try:
        hold("0.0.0.0", port).close()
    except OSError as error:
        owner = port_owner(port)
        taken = f"taken by {owner}" if owner else f"not free ({error.strerror})"
        advice = "stop that process, or choose another port"
        return Finding(SECTION, name, "warn", taken, advice)
    return Finding(SECTION, name, "ok", "free")


def node_address() -> str:
    """The address that Ray gives this machine's node, which the exchange listens on."""
    import ray.util

    address: str = ray.util.get_node_ip_address()  # type: ignore[no-untyped-call]
    return address


def judge_interfaces(
    interfaces: Sequence[Interface], node: str, environment: Mapping[str, str]
) -> Iterator[Finding]:
    """Those that are up, which one the exchange uses (`node` is on it), what the environment
    asks."""
    for one in interfaces:
        if one.up and one.addresses:
            speed = f", {one.speed} Mbit/s" if one.speed else ""
            value = f"{', '.join(one.addresses)}; MTU {one.mtu}{speed}"
            yield Finding(SECTION, one.name, "ok", value)
    used = next((one for one in interfaces if node in one.addresses), None)
    if used is None:
        yield Finding(
            SECTION, "exchange", "fail", f"{node} is on no interface",
            "ranks cannot reach each other; start Ray with --node-ip-address",
        )  # fmt: skip
        return
    yield judged(
        SECTION, "exchange", f"{used.name} ({node})", not 0 < used.speed < FAST_MBIT,
        f"{used.speed} Mbit/s: hosts of one mesh want {FAST_MBIT} or more; --node-ip-address of "
        "`ray start` chooses another interface",
    )  # fmt: skip
    if gloo := environment.get("GLOO_SOCKET_IFNAME"):
        yield judged(
            SECTION, "GLOO_SOCKET_IFNAME", gloo, gloo == used.name,
            f"not used: the exchange takes the node's address, on {used.name}; set "
            "--node-ip-address of `ray start`",
        )  # fmt: skip
    if nccl := environment.get("NCCL_SOCKET_IFNAME"):
        up = [one.name for one in interfaces if one.up and nccl_takes(nccl, one.name)]
        yield judged(
            SECTION, "NCCL_SOCKET_IFNAME", f"{nccl} ({', '.join(up) or 'none'})", bool(up),
            "no such interface is up: NCCL will not start", "fail",
        )  # fmt: skip


def nccl_takes(asked: str, name: str) -> bool:
    """NCCL's rule: a list of prefixes; "=" in front makes them exact, "^" excludes them."""
    excluded = asked.startswith("^")
    asked = asked.removeprefix("^")
    exact = asked.startswith("=")
    names = tuple(part for part in asked.removeprefix("=").split(",") if part)
    return (name in names if exact else name.startswith(names)) is not excluded
