"""Waits for processes that wait for each other."""

from __future__ import annotations

import os
import select
import subprocess
import time
from collections.abc import Sequence
from contextlib import ExitStack


def wait_for_all(processes: Sequence[subprocess.Popen[bytes]], limit_s: float) -> None:
    """Return when all have ended, one has failed, for which the others wait, or the time is over."""
    ends_s = time.monotonic() + limit_s
    with ExitStack() as closing:
        alive = {os.pidfd_open(one.pid): one for one in processes}
        for descriptor in alive:
            closing.callback(os.close, descriptor)
        while alive:
            ended, _, _ = select.select(list(alive), [], [], max(0.0, ends_s - time.monotonic()))
            codes = [alive.pop(descriptor).wait() for descriptor in ended]
            if not ended or any(codes):
                return
