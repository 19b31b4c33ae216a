"""When a pool may follow what it wants: after the want has lasted, and not soon after a change."""

from dataclasses import dataclass

from expertmesh.cluster.autoscaling.settings import PaceSettings
from expertmesh.cluster.autoscaling.signals import Want

# A shrinking that had to be taken back makes the next one wait twice as long, up to this factor.
MOST_PATIENCE = 8.0


@dataclass(slots=True)
class Pace:
    """One pool's memory. Times are seconds of one monotonic clock."""

    settings: PaceSettings
    up_since: float | None = None
    down_since: float | None = None
    changed_at: float = -float("inf")
    shrank: bool = False  # the last change
    patience: float = 1.0

    def follow(self, current: int, want: Want, now_s: float) -> Want:
        """The count to have from now on."""
        if want.count > current:
            return self._grow(current, want, now_s)
        if want.count < current:
            return self._shrink(current, want, now_s)
        self.forget()
        return want

    def forget(self) -> None:
        """The next want has to last from its own start."""
        self.up_since = self.down_since = None

    def _grow(self, current: int, want: Want, now_s: float) -> Want:
        self.down_since = None
        self.up_since = now_s if self.up_since is None else self.up_since
        lasted, since_change = now_s - self.up_since, now_s - self.changed_at
        reason = f"{want.reason}, for {lasted:.0f} s"
        if lasted < self.settings.up_delay_s or since_change < self.settings.up_cooldown_s:
            return Want(current, reason)
        if self.shrank:
            soon = since_change < self.settings.down_delay_s * self.patience
            self.patience = min(self.patience * 2, MOST_PATIENCE) if soon else 1.0
        self._changed(now_s, shrank=False)
        return Want(min(want.count, current + self.settings.max_step_up), reason)

    def _shrink(self, current: int, want: Want, now_s: float) -> Want:
        self.up_since = None
        self.down_since = now_s if self.down_since is None else self.down_since
        lasted, since_change = now_s - self.down_since, now_s - self.changed_at
        reason = f"{want.reason}, for {lasted:.0f} s"
        needed = self.settings.down_delay_s * self.patience
        if lasted < needed or since_change < self.settings.down_cooldown_s:
            return Want(current, reason)
        self._changed(now_s, shrank=True)
        return Want(current - 1, reason)

    def _changed(self, now_s: float, shrank: bool) -> None:
        self.forget()
        self.changed_at, self.shrank = now_s, shrank
