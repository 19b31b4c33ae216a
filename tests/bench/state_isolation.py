"""What tenants can learn of each other: `python -m tests.bench state_isolation`.

Probes: names of one tenant's pages asked for by others with the same tokens; requests of one tenant
against engines that hold another's state. Latency: time to the first token of prompts that another
tenant has cached and that nobody has, in random order (Kolmogorov-Smirnov). Forged: pages and
records changed on the disk, with and without a key. Verification: its share of a restore's time
(kv-state 5, G9).
"""

import os
import random
from argparse import ArgumentParser
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter, sleep
from typing import Any

import numpy as np
import torch
from scipy.stats import ks_2samp

from expertmesh.actors.attention.engine import Engine
from expertmesh.actors.attention.messages import GenerateRequest, SamplingParams
from expertmesh.actors.state.disk.log import DiskLog
from expertmesh.actors.state.item import Header, Item, Kind, StateLayout
from expertmesh.actors.state.keys import chain, root_key
from expertmesh.actors.state.settings import Codec, StateSettings
from expertmesh.actors.state.store import Fetch, fill_layer
from expertmesh.actors.state.tiers.store import TieredStore
from tests.support.state_model import VOCAB, cached, small_model

FINGERPRINT = b"isolation"


def name_probes(count: int, pages: int = 100) -> dict[str, Any]:
    """Names of `pages` pages of one tenant, looked up by as many others as `count` takes."""
    rng = random.Random(0)
    tokens = [rng.randrange(VOCAB) for _ in range(pages * 64)]
    held = set(chain(root_key(FINGERPRINT, "owner"), tokens))
    hits = probes = tenant = 0
    while probes < count:
        names = chain(root_key(FINGERPRINT, f"tenant {tenant}"), tokens)
        hits += sum(name in held for name in names)
        probes, tenant = probes + len(names), tenant + 1
    own = sum(name in held for name in chain(root_key(FINGERPRINT, "owner"), tokens))
    return {"probes": probes, "tenants": tenant, "hits": hits, "own_hits": own, "own_pages": pages}


def _ask(engine: Engine, name: str, prompt: list[int], tenant: str) -> tuple[float, int]:
    """Seconds to the first token, and tokens that were cached."""
    params = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)
    start = perf_counter()
    engine.submit(GenerateRequest(name, prompt, params, tenant=tenant))
    while True:
        for output in engine.step():
            return perf_counter() - start, output.cached_tokens


def engine_probes(count: int, seed: int = 1) -> dict[str, Any]:
    """Half of the probes are of prompts that another tenant has cached just before, half of
    prompts that nobody has ever sent. Nothing of the difference may show."""
    engine = cached(small_model(2), pages=256, slots=2, state={"snapshots": 64})
    rng = np.random.default_rng(seed)
    seconds: dict[bool, list[float]] = {True: [], False: []}
    hits = own = 0
    for number in range(2 * count):
        prompt = rng.integers(0, VOCAB, 129).tolist()
        warm = bool(rng.integers(2))
        # In both cases a request of the owner's goes before, of this prompt or of another.
        other = prompt if warm else rng.integers(0, VOCAB, 129).tolist()
        _ask(engine, f"owner{number}", other, "owner")
        took, found = _ask(engine, f"probe{number}", prompt, "prober")
        seconds[warm].append(took)
        hits += found
        if number % 50 == 0:
            own += _ask(engine, f"own{number}", other, "owner")[1]
    test = ks_2samp(seconds[True], seconds[False])
    return {
        "probes": 2 * count,
        "cached_tokens_seen": hits,
        "owners_own_cached_tokens": own,
        "ks_statistic": round(float(test.statistic), 5),
        "ks_p": round(float(test.pvalue), 4),
        "median_ms": {
            "cached_by_another": round(float(np.median(seconds[True])) * 1e3, 3),
            "cached_by_nobody": round(float(np.median(seconds[False])) * 1e3, 3),
        },
    }


def _page(layout: StateLayout, at: int) -> Item:
    rng = torch.Generator().manual_seed(at)
    rows = torch.randn(layout.page, generator=rng, dtype=torch.float32).to(layout.dtype)
    key = at.to_bytes(32, "big")
    header = Header(key, Kind.PAGE, key, 64 * (at + 1), (), "prefill", layout.fingerprint)
    return Item(header, (rows,))


def _until(fetch: Fetch) -> None:
    deadline = perf_counter() + 60
    while not fetch.done:
        if perf_counter() > deadline:
            raise TimeoutError("a fetch has not ended")
        sleep(1e-4)


def _drop_caches(folder: Path) -> None:
    for path in folder.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def verification(codec: Codec, pages: int = 64) -> dict[str, Any]:
    """Pages of K3's size, written, and restored by a store that has just been opened: the share of
    hashing in the time from the request to the last byte in place."""
    layout = StateLayout((24, 64, 576), (1, 1, 1, 1), (1, 3, 3), torch.bfloat16)
    items = [_page(layout, at) for at in range(pages)]
    raw = sum(item.nbytes for item in items)
    names = [item.header.name for item in items]
    layers, *rest = layout.page
    target = torch.zeros(layers, pages, *rest, dtype=layout.dtype)
    rows: dict[str, Any] = {"codec": codec, "mb": round(raw / 1e6)}
    with TemporaryDirectory() as folder:
        settings = StateSettings(
            host_bytes=0, codec=codec, disk=Path(folder), disk_bytes=1 << 30, read_timeout_s=60
        )

        def opened() -> TieredStore:
            disk = DiskLog.open(Path(folder), capacity=1 << 30, layout=layout.fingerprint)
            return TieredStore(layout, settings, disk=disk)

        store = opened()
        for item in items:
            while not store.put(item, durable=True):
                sleep(0.005)
        _until(store.flush())
        store.close()
        for case in ("cold", "warm"):
            store = opened()
            if case == "cold":
                _drop_caches(Path(folder))
            start = perf_counter()
            fetch = store.fetch(names, 60)
            _until(fetch)
            found = fetch.items
            assert found is not None, fetch.reason
            for layer, paged in enumerate(target):  # as the engine fills its own
                fill_layer(found, 0, layer, paged, range(pages))
            seconds = perf_counter() - start
            same = all(torch.equal(target[:, at], item.parts[0]) for at, item in enumerate(items))
            rows[case] = {
                "gb_per_s": round(raw / seconds / 1e9, 2),
                "verify_share": round(fetch.verify_seconds / seconds, 4),
                "verify_gb_per_s": round(raw / max(fetch.verify_seconds, 1e-9) / 1e9, 1),
                "bytes_equal": same,
            }
            store.close()
    return rows


def forged(count: int = 32) -> dict[str, Any]:
    """Records that somebody without the key has put where sealed ones are looked for, with every
    checksum in order, and sealed ones read with another key."""
    layout = StateLayout((2, 64, 20), (1, 1, 1, 1), (1, 3, 3), torch.float32)
    items = [_page(layout, at) for at in range(count)]

    def write(folder: Path, secret: bytes | None) -> None:
        log = DiskLog.open(folder, capacity=64 << 20, layout=layout.fingerprint, secret=secret)
        for item in items:
            log.append(
                item.header, "raw", item.nbytes, [memoryview(item.parts[0].numpy()).cast("B")]
            )
        log.sync()
        log.close()

    def readable(folder: Path, secret: bytes | None) -> int:
        log = DiskLog.open(folder, capacity=64 << 20, layout=layout.fingerprint, secret=secret)
        found = sum(log.read(item.header.name) is not None for item in items)
        log.close()
        return found

    with TemporaryDirectory() as name:
        sealed, bare = Path(name) / "sealed", Path(name) / "bare"
        write(sealed, b"a" * 32)
        write(bare, None)
        return {
            "records": count,
            "own_key": readable(sealed, b"a" * 32),
            "other_key": readable(sealed, b"b" * 32),
            "no_key": readable(sealed, None),
            "unsealed_under_a_key": readable(bare, b"a" * 32),
        }


def main(arguments: list[str]) -> dict[str, Any]:
    parser = ArgumentParser(prog="python -m tests.bench state_isolation")
    parser.add_argument("--names", type=int, default=10_000_000)
    parser.add_argument("--requests", type=int, default=10_000, help="of each kind")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    return {
        "names": name_probes(options.names),
        "requests": engine_probes(options.requests),
        "forged": forged(),
        "verification": [verification("raw"), verification("lossless")],
    }
