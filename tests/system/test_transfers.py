"""Transfers between real actors: a source that is stopped or killed is a named error in time."""

import os
import signal
import time
from typing import Any

import pytest
import ray

from expertmesh.actors.exchange.settings import ExchangeSettings
from expertmesh.actors.experts.actor import ExpertActor
from expertmesh.actors.experts.transfer import TransferError
from expertmesh.actors.model.loading import LoadSettings
from tests.actors.experts.sample import Sample, write_sample
from tests.support.local_ray import cluster

__all__ = ["cluster"]  # a fixture

HOST = "127.0.0.1"


@pytest.fixture(scope="module")
def sample(tmp_path_factory: pytest.TempPathFactory) -> Sample:
    return write_sample(tmp_path_factory.mktemp("transfers") / "model")


def expert_actor(sample: Sample, ids: list[int]) -> tuple[Any, int]:
    """Its handle and process id."""
    load = LoadSettings(model=sample.source.folder, device="cpu", expert_cache_bytes=1 << 22)
    handle = ray.remote(ExpertActor).options(max_concurrency=12).remote(load, ExchangeSettings())
    ray.get(handle.load.remote(dict.fromkeys(sample.layers, ids)))
    return handle, ray.get(handle.settle.remote(HOST, 1)).pid


def test_an_expert_travels_and_a_source_that_fails_is_named(sample: Sample) -> None:
    (source, pid), (target, _) = expert_actor(sample, [0, 1, 2]), expert_actor(sample, [5])
    layer, full = sample.layers[0], sample.bank(range(7))
    checksum = ray.get(target.adopt.remote(layer, 1, source, 20.0))
    assert checksum == full.checksum(layer, 1)
    assert ray.get(target.checksums.remote({layer: [1, 5]})) == {
        layer: {expert: full.checksum(layer, expert) for expert in (1, 5)}
    }

    with pytest.raises(TransferError, match=r"expert-0: layer .*: expert 6 is not held here"):
        ray.get(target.adopt.remote(layer, 6, source, 20.0, "expert-0"))

    os.kill(pid, signal.SIGSTOP)
    began = time.monotonic()
    with pytest.raises(TransferError, match=r"no answer within 0\.[45]"):
        ray.get(target.adopt.remote(layer, 2, source, 0.5, "expert-0"))
    assert time.monotonic() - began < 10
    os.kill(pid, signal.SIGCONT)
    assert ray.get(target.adopt.remote(layer, 2, source, 20.0, "expert-0"))

    os.kill(pid, signal.SIGSTOP)
    waiting = target.adopt.remote(layer, 0, source, 60.0, "expert-0")
    time.sleep(0.3)
    os.kill(pid, signal.SIGKILL)
    began = time.monotonic()
    with pytest.raises(TransferError) as caught:
        ray.get(waiting)
    assert time.monotonic() - began < 30, "its death is noticed long before the deadline"
    assert (caught.value.layer, caught.value.expert, caught.value.source) == (layer, 0, "expert-0")
    assert ray.get(target.held.remote())[layer] == (1, 2, 5)
    assert ray.get(target.stats.remote()).transfer_failures == 3
    for handle in (source, target):
        ray.kill(handle)
