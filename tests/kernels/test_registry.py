from dataclasses import FrozenInstanceError, fields
from inspect import signature

import pytest

from expertmesh.kernels.registry import Kernels, load_kernels, operator_support


def test_both_backends_offer_every_operator() -> None:
    fast, slow = load_kernels("torch"), load_kernels("reference")
    for field in fields(Kernels):
        if field.name == "backend":
            continue
        a = signature(getattr(fast, field.name)).parameters
        b = signature(getattr(slow, field.name)).parameters
        assert list(a)[: len(b)] == list(b), field.name
        assert all(a[name].default is not a[name].empty for name in list(a)[len(b) :]), field.name
    assert (fast.backend, slow.backend, load_kernels().backend) == ("torch", "reference", "torch")


def test_unknown_backend_names_the_choices() -> None:
    with pytest.raises(ValueError, match=r"'cuda'.*auto, torch, reference"):
        load_kernels("cuda")


def test_record_is_frozen() -> None:
    with pytest.raises(FrozenInstanceError):
        load_kernels().backend = "other"  # type: ignore[misc]


def test_support_names_every_operator_with_a_reason_where_it_is_missing() -> None:
    found = {(one.name, one.backend): one.reason for one in operator_support()}
    operators = {field.name for field in fields(Kernels)} - {"backend"}
    assert {name for name, _ in found} == operators
    for name in operators:
        assert found[name, "reference"] == found[name, "torch"] == ""
    assert all(reason for (_, backend), reason in found.items() if backend == "triton")
