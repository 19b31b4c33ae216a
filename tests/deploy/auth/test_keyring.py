"""Which keys are accepted, and how a changed file becomes what is accepted."""

import asyncio
import base64
import os
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from expertmesh.deploy.auth import keyring as keyring_module
from expertmesh.deploy.auth.keyring import (
    KeyRefused,
    Keyring,
    environment_hashes,
    open_keyring,
)
from expertmesh.deploy.auth.keys import KeysError, file_line, hash_key
from expertmesh.deploy.edge_settings import AuthSettings


def lines(*keys: str) -> str:
    """A keys file in which each key has itself as its name."""
    return "".join(f"- {file_line(key, hash_key(key))}\n" for key in keys)


class Scene:
    """A keyring over a file, with a clock that moves on when told."""

    def __init__(self, path: Path, *hashes: str) -> None:
        self.now, self.path = 0.0, path
        settings = AuthSettings(keys_file=path, key_hashes=hashes)
        self.keyring = Keyring(settings, lambda: self.now)

    def accepted(self, *keys: str) -> list[str]:
        """Those of `keys` that are accepted now."""

        async def one(key: str) -> bool:
            try:
                return bool(await self.keyring.authenticate(f"Bearer {key}"))
            except KeyRefused:
                return False

        async def main() -> list[str]:
            return [key for key in keys if await one(key)]

        return asyncio.run(main())

    def later(self, *keys: str, settle: bool = True) -> list[str]:
        """After the file has changed and the time between two looks has passed."""
        if settle and self.path.exists():  # as if it had been written some time ago
            old = time.time_ns() - 10**11 + int(self.now)
            os.utime(self.path, ns=(old, old))
        self.now += 1.0
        return self.accepted(*keys)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "keys.yaml"
    path.write_text(lines("a", "b"))
    return path


def test_all_keys_of_file_and_settings_are_accepted(path: Path) -> None:
    scene = Scene(path, hash_key("c"), hash_key("a"))
    assert scene.accepted("a", "b", "c", "d", "A") == ["a", "b", "c"]
    assert scene.keyring.usable == 3, "a key that is in both is one, with the file's limits"


def write(path: Path, text: str) -> None:
    path.write_text(text)


def replace(path: Path, text: str) -> None:
    fresh = path.with_suffix(".new")
    fresh.write_text(text)
    fresh.replace(path)


@pytest.mark.parametrize("change", [write, replace])
def test_a_changed_file_is_read_again(path: Path, change: Callable[[Path, str], None]) -> None:
    scene = Scene(path)
    change(path, lines("b", "c"))
    assert scene.accepted("a", "b", "c") == ["a", "b"], "within a second nobody looks"
    assert scene.later("a", "b", "c") == ["b", "c"]
    change(path, lines("a"))
    assert scene.later("a", "b", "c") == ["a"]


def test_a_secret_that_kubernetes_swaps(tmp_path: Path) -> None:
    """keys.yaml -> ..data/keys.yaml, ..data -> a folder of each version; ..data is replaced."""
    for version, keys in (("v1", lines("a")), ("v2", lines("b"))):
        (tmp_path / version).mkdir()
        (tmp_path / version / "keys.yaml").write_text(keys)
        os.utime(tmp_path / version / "keys.yaml", ns=(10**18, 10**18))  # the same time, and size
    data, path = tmp_path / "..data", tmp_path / "keys.yaml"
    data.symlink_to("v1")
    path.symlink_to("..data/keys.yaml")
    scene = Scene(path)
    assert scene.accepted("a", "b") == ["a"]
    (tmp_path / "..data_tmp").symlink_to("v2")
    (tmp_path / "..data_tmp").rename(data)
    assert scene.later("a", "b", settle=False) == ["b"]


@pytest.mark.parametrize("broken", ["", "- {name: a", "- {name: x, hash: secret-canary}", "\0"])
def test_a_broken_file_changes_nothing_and_is_told_once(
    path: Path, broken: str, caplog: pytest.LogCaptureFixture
) -> None:
    scene = Scene(path)
    path.write_text(broken)
    assert scene.later("a", "b") == ["a", "b"]
    assert scene.keyring.failed.startswith(f"keys file {path}: ")
    assert scene.later("a", settle=False) == ["a"]
    assert len(caplog.records) == 1 and str(path) in caplog.text and "canary" not in caplog.text
    path.write_text(lines("c"))
    assert scene.later("a", "c") == ["c"] and scene.keyring.failed == ""


def test_a_file_that_is_gone_or_closed_for_a_while(path: Path) -> None:
    scene = Scene(path)
    kept = path.rename(path.with_suffix(".away"))
    assert scene.later("a", "b") == ["a", "b"] and "No such file" in scene.keyring.failed
    kept.rename(path)
    assert scene.later("a", "b", settle=False) == ["a", "b"] and scene.keyring.failed == ""
    path.unlink()
    path.mkdir()
    assert scene.later("a") == ["a"] and scene.keyring.failed


def test_two_changes_within_one_tick_of_the_files_clock(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Same size, same inode, same time: only reading it again tells."""
    found = path.stat()
    monkeypatch.setattr(keyring_module, "os", SimpleNamespace(stat=lambda _: found))
    scene = Scene(path)
    path.write_text(lines("a", "c"))
    scene.now += 1.0
    assert scene.accepted("a", "b", "c") == ["a", "c"]


def test_an_unchanged_file_is_not_read_again(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scene = Scene(path)
    assert scene.later("a") == ["a"]
    monkeypatch.setattr(keyring_module, "parse_keys", lambda data: pytest.fail("read again"))
    for _ in range(3):
        scene.now += 1.0
        assert scene.accepted("a") == ["a"]


def test_a_key_that_was_taken_out_is_not_accepted_once_more(path: Path) -> None:
    """However long ago the last request was, and however many come at the same moment."""
    scene = Scene(path)
    path.write_text(lines("b"))
    scene.now += 3600

    async def main() -> list[bool]:
        async def one() -> bool:
            try:
                await scene.keyring.authenticate("Bearer a")
            except KeyRefused:
                return False
            return True

        return await asyncio.gather(*[one() for _ in range(20)])

    assert not any(asyncio.run(main()))


def test_a_client_that_goes_does_not_stop_the_reading(path: Path) -> None:
    scene = Scene(path)
    path.write_text(lines("c"))
    scene.now += 1

    async def main() -> str:
        task = asyncio.create_task(scene.keyring.authenticate("Bearer c"))
        await asyncio.sleep(0)
        task.cancel()
        return (await scene.keyring.authenticate("Bearer c")).name

    assert asyncio.run(main()) == "c"


def test_a_server_does_not_start_with_a_broken_file(tmp_path: Path) -> None:
    with pytest.raises(KeysError, match=r"keys file .*none\.yaml: No such file"):
        open_keyring(AuthSettings(keys_file=tmp_path / "none.yaml"))
    (tmp_path / "empty").touch()
    with pytest.raises(KeysError, match="no keys in it"):
        open_keyring(AuthSettings(keys_file=tmp_path / "empty"))
    assert open_keyring(AuthSettings()) is None


def refusal(header: str | None, *, basic: bool = False) -> str:
    """The reason, or the name of the accepted key."""
    keyring = Keyring(AuthSettings(key_hashes=(hash_key("k:1"), hash_key("a b"))))

    async def main() -> str:
        try:
            return (await keyring.authenticate(header, basic=basic)).name
        except KeyRefused as refused:
            return refused.reason

    return asyncio.run(main())


NAME = f"key-{hash_key('k:1')[7:15]}"


def password(pair: str) -> str:
    return base64.b64encode(pair.encode()).decode()


@pytest.mark.parametrize(
    ("header", "outcome"),
    [
        (None, "missing"), ("", "missing"), ("Bearer", "missing"), ("Bearer ", "missing"),
        ("k:1", "missing"), ("Basic k:1", "missing"), (f"Basic {password('u:k:1')}", "missing"),
        ("Token k:1", "missing"), ("Bearer x", "unknown"), ("Bearer k:1x", "unknown"),
        ("Bearer K:1", "unknown"), ("Bearer \xff\xfe", "unknown"), ("Bearer " + "x" * 9, "unknown"),
        ("Bearer k:1", NAME), ("bearer k:1", NAME), ("BEARER  k:1 ", NAME),
    ],
)  # fmt: skip
def test_headers(header: str | None, outcome: str) -> None:
    assert refusal(header) == outcome


@pytest.mark.parametrize(
    ("header", "outcome"),
    [
        (f"Basic {password('anyone:k:1')}", NAME), (f"basic {password(':k:1')}", NAME),
        ("Bearer k:1", NAME), (f"Basic {password('k:1')}", "unknown"),
        (f"Basic {password('nobody')}", "missing"), ("Basic ???", "missing"),
        ("Basic /////w==", "missing"), (f"Basic {password('a:x')}", "unknown"),
    ],
)  # fmt: skip
def test_headers_where_a_browser_may_ask(header: str, outcome: str) -> None:
    assert refusal(header, basic=True) == outcome


def test_expired_and_disabled_keys_are_told_so(tmp_path: Path) -> None:
    path = tmp_path / "keys.yaml"
    path.write_text(
        f"- {{name: a, hash: '{hash_key('a')}', expires: 2020-01-01}}\n"
        f"- {{name: b, hash: '{hash_key('b')}', disabled: true}}\n"
    )
    keyring = Keyring(AuthSettings(keys_file=path))
    assert keyring.usable == 0

    async def main() -> None:
        for key, said in (("a", "has expired"), ("b", "is disabled")):
            with pytest.raises(KeyRefused, match=said) as raised:
                await keyring.authenticate(f"Bearer {key}")
            assert raised.value.reason == "expired"

    asyncio.run(main())


def test_keys_of_the_environment() -> None:
    assert environment_hashes({}) == ()
    given = environment_hashes({"EXPERTMESH_API_KEYS": " one,two ,,one"})
    assert given == (hash_key("one"), hash_key("two"))
    for empty in ("", " ", ",,"):
        with pytest.raises(KeysError, match="holds no key"):
            environment_hashes({"EXPERTMESH_API_KEYS": empty})
    with pytest.raises(KeysError, match="key 2 of EXPERTMESH_API_KEYS") as raised:
        environment_hashes({"EXPERTMESH_API_KEYS": "fine,canary canary"})
    assert "canary" not in str(raised.value)
