"""Programs and modules from outside that some tests need: a machine without them skips with the
reason, unless EXPERTMESH_ALL_TESTS=1 says that everything has been installed."""

import os
import shutil
from pathlib import Path
from typing import NoReturn

import pytest


def require_tool(*names: str) -> Path:
    """Path of the first of `names` that is installed. Skips the test, or fails it under
    EXPERTMESH_ALL_TESTS=1, when none is."""
    for name in names:
        # Debian puts daemons where ordinary users do not look.
        found = shutil.which(name) or shutil.which(name, path="/usr/sbin:/sbin")
        if found is not None:
            return Path(found)
    missing(f"{' or '.join(names)} is not installed")


def missing(reason: str) -> NoReturn:
    """Skips, or fails where everything has to be there."""
    if os.environ.get("EXPERTMESH_ALL_TESTS") == "1":
        pytest.fail(reason)
    pytest.skip(reason)
