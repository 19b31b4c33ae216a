"""What front doors must know of a mesh: its attention replicas, and whether it serves."""

import msgspec


class Directory(msgspec.Struct, frozen=True):
    """One state of the mesh, as a front door sees it.

    version: grows with every change. replicas: (seat, Ray actor name); a seat ("attention-0")
    stays when the process in it is replaced, the name does not. serving: whether requests sent now
    will be served; it stays true through a recovery that should end soon. reason: why not.
    """

    version: int = 0
    replicas: tuple[tuple[str, str], ...] = ()
    serving: bool = False
    reason: str = "the mesh is starting"


class ScaleError(ValueError):
    """A wish that cannot be met. `field` names it: experts or attention."""

    def __init__(self, message: str, field: str) -> None:
        super().__init__(message, field)  # all arguments, so that it survives pickling
        self.message, self.field = message, field

    def __str__(self) -> str:
        return self.message
