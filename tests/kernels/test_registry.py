from collections.abc import Callable
from dataclasses import FrozenInstanceError, fields
from importlib import import_module
from inspect import signature

import pytest
import torch

from expertmesh.kernels import registry
from expertmesh.kernels.registry import (
    OPERATORS,
    Kernels,
    KernelsUnavailable,
    load_kernels,
    operator_support,
    resolve,
)

TRITON = [name for name, operator in OPERATORS.items() if not operator.without_triton]


def test_the_record_and_the_list_name_the_same_operators() -> None:
    assert [field.name for field in fields(Kernels)] == ["backend", *OPERATORS]


@pytest.mark.parametrize("name", OPERATORS)
def test_all_backends_take_the_same_arguments(name: str) -> None:
    def parameters(module: str) -> dict[str, bool]:
        """Name -> whether it may be left out."""
        full = f"expertmesh.kernels.{OPERATORS[name].home}.{module}"
        found = signature(getattr(import_module(full), name)).parameters
        return {key: one.default is not one.empty for key, one in found.items()}

    slow, fast = parameters("reference"), parameters("torch_ops")
    assert list(fast)[: len(slow)] == list(slow)
    assert all(list(fast.values())[len(slow) :])
    if name in TRITON:
        assert parameters("triton_ops") == fast


def test_auto_is_torch_on_a_cpu() -> None:
    assert set(resolve("auto", "cpu").values()) == {"torch"}
    assert load_kernels().backend == "auto"
    assert load_kernels("torch").rms_norm is load_kernels().rms_norm


def test_one_operator_of_another_backend() -> None:
    served = resolve("torch, sample=reference", "cpu")
    assert served.pop("sample") == "reference" and set(served.values()) == {"torch"}
    kernels = load_kernels("torch,sample=reference")
    assert kernels.sample.__module__.endswith("reference")
    assert kernels.rms_norm.__module__.endswith("torch_ops")


@pytest.mark.parametrize(
    ("choice", "message"),
    [
        ("cuda", r"backend 'cuda'; choose one of auto, triton, torch, reference"),
        ("", r"backend ''"),
        ("auto,bananas=torch", r"operator 'bananas'; there are pack_linear, rms_norm"),
        ("auto,sample=auto", r"sample: unknown kernel backend 'auto'"),
        ("auto,sample", r"sample: unknown kernel backend ''"),
        ("auto,", r"a comma is followed by OPERATOR=BACKEND"),
        ("sample=torch", r"a backend for all comes first, as in 'auto,sample=torch'"),
        ("auto,sample=torch,sample=reference", r"sample: both torch and reference"),
        ("auto,pack_linear=triton", r"triton cannot serve pack_linear: no Triton kernel: a dense"),
    ],
)
def test_a_choice_that_cannot_be_is_refused_by_name(choice: str, message: str) -> None:
    with pytest.raises(KernelsUnavailable, match=message):
        resolve(choice, "cpu")


@pytest.fixture
def on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> Callable[[bool], None]:
    def pretend(available: bool) -> None:
        monkeypatch.setattr(registry, "interpreted", lambda: False)
        monkeypatch.setattr(registry.torch.cuda, "is_available", lambda: available)
        monkeypatch.setattr(registry.torch.cuda, "get_device_capability", lambda: (9, 0))

    return pretend


def test_auto_is_triton_on_a_gpu_where_there_is_a_kernel(on_a_gpu: Callable[[bool], None]) -> None:
    on_a_gpu(True)
    served = resolve("auto", "cuda")
    assert served == {name: "triton" if name in TRITON else "torch" for name in OPERATORS}
    assert resolve("triton", "cuda") == served
    with pytest.raises(KernelsUnavailable, match="the reference is for the CPU"):
        resolve("reference", "cuda")


def test_triton_without_a_gpu_is_refused_with_the_reason(on_a_gpu: Callable[[bool], None]) -> None:
    on_a_gpu(False)
    with pytest.raises(KernelsUnavailable, match="triton cannot serve rms_norm: no CUDA device"):
        resolve("triton", "cuda")
    with pytest.raises(KernelsUnavailable, match="cannot serve rms_norm: Triton kernels run on a"):
        resolve("triton", "cpu")
    assert set(resolve("auto", "cuda").values()) == {"torch"}


def test_fp8_casts_need_a_gpu_that_has_them(
    on_a_gpu: Callable[[bool], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    on_a_gpu(True)
    monkeypatch.setattr(registry.torch.cuda, "get_device_capability", lambda: (8, 0))
    served = resolve("auto", "cuda")
    assert served["fp8_encode"] == served["fp8_decode"] == "torch"
    assert served["rms_norm"] == "triton"
    with pytest.raises(KernelsUnavailable, match="fp8_encode: E4M3 casts need compute capability"):
        resolve("triton", "cuda")


def test_the_interpreter_s_bfloat16_is_refused() -> None:
    with pytest.raises(KernelsUnavailable, match="computes wrongly in"):
        load_kernels("auto,rms_norm=triton", "cpu", torch.bfloat16)
    load_kernels("auto", "cpu", torch.bfloat16)


def test_record_is_frozen() -> None:
    with pytest.raises(FrozenInstanceError):
        load_kernels().backend = "other"  # type: ignore[misc]


def test_support_names_every_operator_with_a_reason_where_it_is_missing() -> None:
    found = {(one.name, one.backend): one for one in operator_support()}
    assert {name for name, _ in found} == set(OPERATORS)
    for name, operator in OPERATORS.items():
        assert found[name, "reference"].reason == found[name, "torch"].reason == ""
        assert found[name, "torch"].chosen
        assert (found[name, "triton"].reason == "") == (not operator.without_triton)


def test_a_backend_that_cannot_be_imported_is_told_not_raised(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    whole = registry._module

    def damaged(home: str, backend: str) -> object:
        if (home, backend) == ("mla", "torch"):
            raise ImportError("libgomp")
        return whole(home, backend)

    monkeypatch.setattr(registry, "_module", damaged)
    found = {(one.name, one.backend): one for one in operator_support()}
    broken = found["mla_decode", "torch"]
    assert broken.chosen and broken.reason == "ImportError: libgomp"
    assert found["rms_norm", "torch"].reason == ""
    with pytest.raises(KernelsUnavailable, match="cannot serve mla_plan: ImportError: libgomp"):
        load_kernels()
