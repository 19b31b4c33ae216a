"""What can be wrong with a checkpoint: in parts that a report can sort, and as an error."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Problem:
    """`text` is the whole sentence, as errors tell it. The other fields are the parts that apply:
    file: plain name. tensor: full name, with the family prefix. expected, found: in words."""

    text: str
    file: str = ""
    tensor: str = ""
    expected: str = ""
    found: str = ""


class CheckpointError(ValueError):
    """A checkpoint that cannot be served. The message names the tensor and the shard."""

    def __init__(
        self, message: str, *, file: str = "", tensor: str = "", expected: str = "", found: str = ""
    ) -> None:
        super().__init__(message)
        self.problem = Problem(message, file, tensor, expected, found)
