"""Makes Triton's interpreter prepare triton.language once per launch, from a list made once.

For the time of a launch it replaces each function of the language by one that interprets, looking
all of them up by inspection; and again at every call of a @triton.jit helper, for its module. In
kernels of many helpers that was a third of the time.
"""

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

import triton.language as tl
from triton.runtime import interpreter


def install() -> None:
    """Once for the process; later calls do nothing."""
    if interpreter._patch_lang.__module__ == __name__:
        return
    prepare_for = interpreter._patch_lang
    members_of: dict[Any, list[tuple[str, Any]]] = {}
    scopes: dict[int, Any] = {}  # by module of a kernel or helper, during a launch

    def prepare(function: Any) -> Any:
        module = id(function.__globals__)
        if module in scopes:
            return interpreter._LangPatchScope()
        first, scope = not scopes, prepare_for(function)
        scopes[module] = scope
        if first:  # the launch itself, which restores in the end
            scope.restore = partial(restore, scope.restore)
        return scope

    def restore(last: Callable[[], None]) -> None:
        for scope in [*scopes.values()][:0:-1]:
            scope.restore()
        scopes.clear()
        last()

    def prepare_builtins(package: Any, builder: Any, scope: Any) -> None:
        if package not in members_of:
            members_of[package] = inspect.getmembers(package, tl.core.is_builtin)
        for name, member in members_of[package]:
            interpreter._patch_attr(package, name, member, builder, scope)

    interpreter._patch_lang, interpreter._patch_builtin = prepare, prepare_builtins
