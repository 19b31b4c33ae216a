"""Lets the model be imported on a machine that has torch, Triton and numpy and nothing else.

The model's configuration classes are pydantic's and msgspec's, digests are xxhash's. Whoever builds
a configuration in code needs none of what those packages do; a stand-in takes their place in
`sys.modules` where the real one is not installed.
"""

import sys
from importlib.util import find_spec
from types import ModuleType
from typing import Any

PACKAGES = ("pydantic", "msgspec", "msgspec.json", "xxhash")


class Record:
    """A class whose fields are given by name and not checked; defaults are class attributes."""

    def __init_subclass__(cls, **_: Any) -> None:
        super().__init_subclass__()

    def __init__(self, *_: Any, **values: Any) -> None:
        self.__dict__.update(values)


class _StandIn(ModuleType):
    """Classes stand for `Record`, errors for an Exception, functions for decorators that change
    nothing."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if name.endswith("Error"):
            return type(name, (Exception,), {})
        if name[0].isupper():
            return Record
        return lambda *_, **__: lambda function: function


def install() -> list[str]:
    """Returns the names of the packages that are missing here and were replaced."""
    missing = {name for name in PACKAGES if "." not in name and _is_missing(name)}
    for name in PACKAGES:
        if name.partition(".")[0] in missing:
            module = sys.modules.setdefault(name, _StandIn(name))
            package, _, child = name.rpartition(".")
            if package:
                setattr(sys.modules[package], child, module)
    return sorted(missing)


def _is_missing(name: str) -> bool:
    replaced = isinstance(sys.modules.get(name), _StandIn)
    return replaced or find_spec(name) is None
