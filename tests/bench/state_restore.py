"""What loads of pages cost beside a plain copy and a plain read of the same bytes (kv-state G5)."""

import os
import tempfile
import time
from argparse import ArgumentParser
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch

from expertmesh.actors.model.config import parse_config
from expertmesh.actors.state.disk.log import DiskLog
from expertmesh.actors.state.filling import LayerFill
from expertmesh.actors.state.item import Item, StateLayout
from expertmesh.actors.state.model_state import ModelState
from expertmesh.actors.state.settings import StateSettings
from expertmesh.actors.state.tiers.store import TieredStore
from tests.support.checkpoints import config_dict
from tests.support.tiers import finished, names, page, press, until

# MLA layers of K3's size, half as many as it has: 0.9 MB per page.
LAYERS = {"num_hidden_layers": 48, "kv_lora_rank": 512, "qk_rope_head_dim": 64}
CONFIG = parse_config(config_dict(**LAYERS))
LAYOUT = StateLayout.of(CONFIG, torch.bfloat16)


def restore_bandwidth(count: int = 96, trials: int = 5) -> dict[str, Any]:
    """GB/s of unpacked bytes, medians: fetch, verification and the copy of every layer to where the
    forward pass reads it, from host memory and from disk (its page cache dropped before); the same
    bytes copied by page and layer, and all by one call; and the same files read into reused memory
    and copied."""
    state = ModelState(CONFIG, count, 1, LAYOUT.dtype)
    sets = [[page(tag, at, layout=LAYOUT) for at in range(count)] for tag in ("one", "other")]
    nbytes = sum(item.nbytes for item in sets[0])
    result: dict[str, Any] = {"megabytes": round(nbytes / 1e6, 1)}
    for codec in ("raw", "lossless"):
        speeds, shares = _from_host(codec, sets[0], state, nbytes, trials)
        from_disk = _from_disk(codec, sets, state, nbytes, trials)
        speeds, shares = speeds | from_disk[0], shares | from_disk[1]
        gb_per_s = {name: nbytes / 1e9 / median(seconds) for name, seconds in speeds.items()}
        result[codec] = {
            **{f"{name}_gb_per_s": round(speed, 3) for name, speed in gb_per_s.items()},
            "host_of_memcpy": round(gb_per_s["host"] / gb_per_s["memcpy"], 3),
            "host_of_one_memcpy": round(gb_per_s["host"] / gb_per_s["one_memcpy"], 3),
            "disk_of_pread": round(gb_per_s["disk"] / gb_per_s["pread"], 3),
            **{f"verify_share_of_{name}": round(share, 4) for name, share in shares.items()},
        }
    return result


Times = tuple[dict[str, list[float]], dict[str, float]]  # seconds, and shares of verification


def _from_host(
    codec: str, items: Sequence[Item], state: ModelState, nbytes: int, trials: int
) -> Times:
    """In turns with what it is compared with."""
    settings = StateSettings.model_validate({"host_bytes": 2 * nbytes, "codec": codec})
    store = TieredStore(LAYOUT, settings)
    for item in items:
        press(store, item)
    until(lambda: store.stats().host.queued == 0)
    out = state.paged()
    warm, copies, once = list[tuple[float, float]](), list[float](), list[float]()
    whole = torch.stack([item.parts[0] for item in items], 1)
    for _ in range(trials):
        warm.append(_restore(store, items, state))
        copies.append(_copy(items, out))
        begun = time.perf_counter()
        out.copy_(whole)
        once.append(time.perf_counter() - begun)
    store.close()
    seconds = {"one_memcpy": once, "memcpy": copies, "host": [t for t, _ in warm]}
    return seconds, {"host": median(v / t for t, v in warm)}


def _from_disk(
    codec: str, sets: Sequence[Sequence[Item]], state: ModelState, nbytes: int, trials: int
) -> Times:
    """Host memory is full, as it is after some time: each set displaces the other, and its memory
    is used again. A process that has just begun gets its memory page by page from the kernel, which
    can take longer than the disk."""
    with tempfile.TemporaryDirectory(dir=Path.cwd()) as name:  # no file system in memory
        folder = Path(name)
        settings = StateSettings.model_validate({"host_bytes": nbytes * 8 // 10, "codec": codec})
        capacity = max(4 * nbytes, 64 << 20)
        disk = DiskLog.open(folder, capacity=capacity, layout=LAYOUT.fingerprint)
        store = TieredStore(LAYOUT, settings, disk=disk)
        for items in sets:
            for item in items:
                press(store, item, durable=True)
            assert finished(store.flush()).items == []
        cold, plain = list[tuple[float, float]](), list[float]()
        for at in range(len(sets) * (trials + 1)):
            before = store.stats().disk.read_bytes
            _forget(folder)
            cold.append(_restore(store, sets[at % len(sets)], state))
            read = store.stats().disk.read_bytes - before
            plain.append(_read_and_copy(_forget(folder), read, sets[0], state))
        store.close()
    cold, plain = cold[len(sets) :], plain[len(sets) :]  # the first filled host memory
    seconds = {"pread": plain, "disk": [t for t, _ in cold]}
    return seconds, {"disk": median(v / t for t, v in cold)}


def _restore(store: TieredStore, items: Sequence[Item], state: ModelState) -> tuple[float, float]:
    """Seconds in all, and of hashing by whatever threads. As the engine does it."""
    state.latents.fill_(float("nan"))
    begun = time.perf_counter()
    fetch = store.fetch(names(items), 60.0)
    while not fetch.done:
        time.sleep(0.0001)
    found = fetch.items
    assert found is not None, fetch.reason
    LayerFill(state, list(enumerate(found)), 0, None).wait(CONFIG.num_layers - 1)
    seconds = time.perf_counter() - begun
    assert all(torch.equal(state.paged()[:, at], item.parts[0]) for at, item in enumerate(items))
    verify_s = fetch.verify_seconds
    fetch.cancel()
    return seconds, verify_s


def _copy(items: Sequence[Item], out: torch.Tensor) -> float:
    begun = time.perf_counter()
    for layer, paged in enumerate(out):
        for item, rows in zip(items, paged, strict=True):
            rows.copy_(item.parts[0][layer])
    return time.perf_counter() - begun


def _read_and_copy(
    files: Sequence[Path], nbytes: int, items: Sequence[Item], state: ModelState
) -> float:
    """So many bytes of the same files, a record's size at a time into one buffer, and then to their
    place."""
    size = nbytes // len(items)
    buffer = np.zeros(size, np.uint8)
    flat = state.caches.view(torch.uint8).view(-1).numpy()[: len(items) * items[0].nbytes]
    flat = flat.reshape(len(items), -1)
    begun, done = time.perf_counter(), 0
    for path in sorted(files, key=lambda path: -path.stat().st_size):
        handle = os.open(path, os.O_RDONLY)
        for offset in range(0, path.stat().st_size, size):
            if done == len(items):
                break
            got = os.preadv(handle, [memoryview(buffer)], offset)
            flat[done, :got] = buffer[:got][: flat.shape[1]]
            done += 1
        os.close(handle)
    return time.perf_counter() - begun


def _forget(folder: Path) -> list[Path]:
    """All files, which are out of the page cache now."""
    files = [path for path in folder.rglob("*") if path.is_file()]
    for path in files:
        handle = os.open(path, os.O_RDONLY)
        os.fsync(handle)
        os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(handle)
    return files


def main(arguments: list[str]) -> dict[str, Any]:
    parser = ArgumentParser(prog="state_restore", description=__doc__)
    parser.add_argument("--pages", type=int, default=96)
    parser.add_argument("--trials", type=int, default=5)
    options = parser.parse_args(arguments)
    return restore_bandwidth(options.pages, options.trials)
