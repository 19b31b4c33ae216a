"""Alarms of the collapse detector: what a person or a metric gets to see of them."""

from typing import Literal

import msgspec

Kind = Literal["dead_expert", "entropy_drop", "router_nonfinite", "expert_nonfinite"]

# A layer may lose hundreds of experts at once; a line of the log names so many.
MOST_NAMED = 16


class Alarm(msgspec.Struct, frozen=True):
    """layer: absolute number. experts: those that died, at most MOST_NAMED of `count`.

    value, expected: by kind. dead_expert: hits since the last one, and how many there should have
    been for the least popular of them. entropy_drop: normalised entropy now and before.
    *_nonfinite: rows in this window, and 0.
    """

    kind: Kind
    layer: int
    value: float
    expected: float
    experts: tuple[int, ...] = ()
    count: int = 1

    def line(self) -> str:
        """For the log."""
        if self.kind == "dead_expert":
            named = ", ".join(map(str, self.experts))
            more = f" and {self.count - len(self.experts)} more" if self.count > MOST_NAMED else ""
            return (
                f"layer {self.layer}: experts {named}{more} have no hits where at least "
                f"{self.expected:.0f} each were expected"
            )
        if self.kind == "entropy_drop":
            return (
                f"layer {self.layer}: the entropy of the routing fell from {self.expected:.3f} to "
                f"{self.value:.3f}"
            )
        what = "router weights" if self.kind == "router_nonfinite" else "expert sums"
        return f"layer {self.layer}: {self.value:.0f} rows of {what} are not finite"
