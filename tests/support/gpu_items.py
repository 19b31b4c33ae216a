"""Items of a section that end as items on a GPU may: with a result, or in one of the other ways."""

import os
import time
from collections.abc import Callable


def prepare() -> Callable[[str, str], str]:
    return _run


def _run(section: str, item: str) -> str:
    """Returns which process it ran in."""
    match item:
        case "hangs":
            time.sleep(60)
        case "dies":
            os._exit(7)
        case "fails":
            raise ValueError("a wrong number")
        case "faults":
            raise RuntimeError("CUDA error: an illegal memory access")
    return f"{section}: {item} in {os.getpid()}"
