"""Makes a worker honestly slower than its device, so that unequal clusters can be tried on equal hardware."""

from __future__ import annotations

import time
from collections.abc import Callable

from atoll.errors import SettingError


class Throttle:
    """Stretches compute time by 1 / speed. Time spent waiting for others is never stretched.

    Compute runs from `resume` to the next `pay`, and from each `pay` to the next. `sync` finishes the device's queued
    work first, so that what is measured is the device's time and not the time to enqueue."""

    def __init__(self, speed: float, sync: Callable[[], None] | None = None) -> None:
        if not 0 < speed <= 1:  # NaN too
            raise SettingError("speed", speed, "must be above 0 and at most 1", "1 is the device's full speed")
        self._added_per_second = 1 / speed - 1
        self._sync = sync
        self._since_s = time.monotonic()
        self._due_s = 0.0

    @property
    def slows(self) -> bool:
        """True unless the worker runs at its device's full speed."""
        return self._added_per_second > 0

    def resume(self) -> None:
        """Compute begins again here; what lies between the last `pay` and now was waiting."""
        self._since_s = time.monotonic()

    def waited(self, seconds: float) -> None:
        """Count `seconds` since the last `resume` or `pay` as time spent waiting for others."""
        self._since_s += seconds

    def pay(self) -> None:
        """Sleep for the compute since the last `pay` or `resume`. What one sleep overshoots the next ones leave out."""
        if self._added_per_second == 0:
            return
        if self._sync is not None:
            self._sync()
        before_s = time.monotonic()
        self._due_s += (before_s - self._since_s) * self._added_per_second
        if self._due_s > 0:
            time.sleep(self._due_s)
        self._since_s = time.monotonic()
        self._due_s -= self._since_s - before_s
