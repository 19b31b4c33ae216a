"""What is wrong with a cluster file."""

from typing import NamedTuple


class Finding(NamedTuple):
    """key: where in the file, as "provider.worker_ips". warning: it may still work."""

    key: str
    message: str
    warning: bool = False

    def __str__(self) -> str:
        return f"{self.key}: {self.message}"
