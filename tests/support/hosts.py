"""Hosts made of Linux namespaces, joined by a bridge: real multi-host tests on one machine.

A host has its own network, host name, processes, /tmp, /dev/shm and home, and an sshd. All of it
hangs on unnamed namespaces, so two test runs never meet and nothing can be left behind: when the
first process of a host dies, the kernel ends all its others, and a test run that is killed takes
its hosts along.
"""

import contextlib
import ctypes
import os
import shlex
import subprocess
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil

from tests.support.server_process import wait_for
from tests.support.tools import missing, require_tool

NETWORK = "10.77.0"
REPOSITORY = Path(__file__).resolve().parents[2]
_HELD = ["setpriv", "--pdeathsig", "KILL", "unshare", "--fork", "--kill-child"]
# Which kernels compute, so that hosts and this process agree to the last bit.
_INHERITED = (
    "ATEN_CPU_CAPABILITY",
    "ONEDNN_MAX_CPU_ISA",
    "MKL_ENABLE_INSTRUCTIONS",
    "PYTHONPATH",
)
_LIBC = ctypes.CDLL(None, use_errno=True)
_CLONE_NEWNET = 0x40000000

# Run as the first process of a host. $1 name, $2 the scene's folder, $3 bytes of /dev/shm, then
# folders that must stay visible although a fresh /tmp would hide them.
_BOOT = r"""
set -e
name=$1 scene=$2 shm=$3; shift 3
hostname "$name"
mount -t tmpfs -o mode=755 tmpfs /mnt
mkdir -p /mnt/scene /mnt/home
mount --bind "$scene" /mnt/scene
n=0
for path in "$@"; do n=$((n + 1)); mkdir "/mnt/keep$n"; mount --bind "$path" "/mnt/keep$n"; done
mount -t tmpfs -o mode=1777 tmpfs /tmp
n=0
for path in "$@"; do n=$((n + 1)); mkdir -p "$path"; mount --bind "/mnt/keep$n" "$path"; done
mount -t tmpfs -o "mode=1777,size=$shm" tmpfs /dev/shm
mount -t tmpfs -o mode=755 tmpfs /run
mkdir -p /run/sshd
# A home of its own, without touching the interpreter that may live under the real one.
sed 's|^root:.*|root:x:0:0:root:/mnt/home:/bin/bash|' /etc/passwd > /mnt/passwd
mount --bind /mnt/passwd /etc/passwd
cp -r "/mnt/scene/home/." /mnt/home
ip link set lo up
/usr/sbin/sshd -f /mnt/scene/sshd_config -E /tmp/sshd.log
while :; do sleep 86400 & wait $! || true; done
"""

_SSHD = """
HostKey /mnt/scene/host_key
AuthorizedKeysFile /mnt/scene/key.pub
StrictModes no
PermitRootLogin prohibit-password
PasswordAuthentication no
UsePAM no
PidFile /run/sshd.pid
MaxStartups 50
"""


class Host:
    """One machine. Made by `Scene.host`."""

    def __init__(self, name: str, address: str, held: subprocess.Popen[bytes], switch: int) -> None:
        self.name, self.address = name, address
        self._held, self._switch = held, switch
        self.pid = _first_child(held)

    def inside(self, *command: str) -> list[str]:
        """The command line that runs `command` as a login of this host would."""
        line = f"source ~/.bashrc; cd; exec {shlex.join(command)}"
        enter = ["nsenter", "-t", str(self.pid), "-n", "-u", "-i", "-m", "-p"]
        return [*enter, "env", "-i", "HOME=/mnt/home", "USER=root", "LANG=C.UTF-8",
                "PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
                "bash", "-c", line]  # fmt: skip

    def run(self, *command: str, seconds: float = 60.0) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            self.inside(*command), capture_output=True, text=True, timeout=seconds, check=False
        )

    def threads(self, count: int) -> ThreadPoolExecutor:
        """Whatever they and the threads they start connect to, they do from this host."""
        return ThreadPoolExecutor(count, f"on-{self.name}", _enter_network, (self.pid,))

    def cut(self) -> None:
        """Pulls the cable: packets to and from this host vanish, nobody is told."""
        self._link("down")

    def mend(self) -> None:
        self._link("up")

    def kill(self) -> None:
        """The power goes: every process ends at once, and no goodbye leaves the host."""
        self.cut()
        self._held.kill()
        self._held.wait(30)

    def _link(self, state: str) -> None:
        _ip(self._switch, "link", "set", self.name, state)


class Scene:
    """A switch, hosts, and a folder that all of them see as /mnt/scene. Made by `scene`."""

    def __init__(self, folder: Path, stack: contextlib.ExitStack) -> None:
        self.folder, self._stack = folder, stack
        self.hosts: list[Host] = []
        self._switch = _first_child(self._hold(["--net"], ["sleep", "infinity"]))
        _ip(self._switch, "link", "add", "switch", "type", "bridge")
        _ip(self._switch, "link", "set", "switch", "up")
        (folder / "home").mkdir()
        prefix = shlex.quote(sys.prefix)
        (folder / "home/.bashrc").write_text(
            f"export PATH={prefix}/bin:$PATH OMP_NUM_THREADS=1\n"
            + "".join(
                f"export {name}={shlex.quote(os.environ[name])}\n"
                for name in _INHERITED
                if name in os.environ
            )
        )
        (folder / "home/expertmesh").symlink_to(sys.prefix)
        (folder / "sshd_config").write_text(_SSHD)
        for name in ("key", "host_key"):
            subprocess.run(
                ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", folder / name], check=True
            )

    def host(self, name: str, shm_bytes: int = 1 << 30) -> Host:
        """name: also of its link, at most 15 characters."""
        kinds = ["--net", "--uts", "--ipc", "--mount", "--pid", "--mount-proc"]
        folders = (REPOSITORY, Path(sys.prefix), Path(sys.base_prefix), self.folder)
        kept = [str(path) for path in folders if path.is_relative_to("/tmp")]
        boot = ["bash", "-c", _BOOT, "boot", name, str(self.folder), str(shm_bytes), *kept]
        held = self._hold(kinds, boot)
        host = Host(name, f"{NETWORK}.{len(self.hosts) + 10}", held, self._switch)
        veth = ["type", "veth", "peer", "name", name, "netns", str(self._switch)]
        _run("ip", "link", "add", "eth0", "netns", str(host.pid), *veth)
        _ip(self._switch, "link", "set", name, "master", "switch", "up")
        _ip(host.pid, "addr", "add", f"{host.address}/24", "dev", "eth0")
        _ip(host.pid, "link", "set", "eth0", "up")
        # Nobody is there, but programs find their own address by asking for the way out.
        _ip(host.pid, "route", "add", "default", "via", f"{NETWORK}.1")
        self.hosts.append(host)
        wait_for(lambda: host.run("test", "-e", "/run/sshd.pid").returncode == 0, 20)
        return host

    def _hold(self, kinds: Sequence[str], command: Sequence[str]) -> subprocess.Popen[bytes]:
        held = subprocess.Popen([*_HELD, *kinds, *command], stdin=subprocess.DEVNULL)
        self._stack.callback(held.wait)
        self._stack.callback(held.kill)
        return held


@contextlib.contextmanager
def scene(folder: Path) -> Iterator[Scene]:
    """Whatever happens, no host survives the block. Skips where namespaces are not permitted."""
    for tool in ("ip", "sshd", "ssh", "rsync", "unshare", "nsenter", "setpriv"):
        require_tool(tool)
    tried = subprocess.run(
        [*_HELD, "--net", "--mount", "--pid", "true"], capture_output=True, text=True, check=False
    )
    if tried.returncode:
        missing(f"namespaces are not permitted here: {tried.stderr.strip()}")
    with contextlib.ExitStack() as stack:
        yield Scene(folder, stack)


def _first_child(held: subprocess.Popen[bytes]) -> int:
    """pid of the process that unshare has forked, once its namespaces are there."""
    wait_for(lambda: bool(psutil.Process(held.pid).children()), 10)
    return int(psutil.Process(held.pid).children()[0].pid)


def _ip(pid: int, *arguments: str) -> None:
    _run("nsenter", "-t", str(pid), "-n", "ip", *arguments)


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{shlex.join(command)}: {done.stderr}"


def _enter_network(pid: int) -> None:
    """For this thread, for good."""
    with open(f"/proc/{pid}/ns/net") as there:
        if _LIBC.setns(there.fileno(), _CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
