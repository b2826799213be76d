"""A rank that waits in a step for word that its run is to stop."""

from __future__ import annotations

import time

import atoll


def await_stop(run: atoll.Run) -> None:
    """Not where no agent is there."""
    ends_s = time.monotonic() + 60
    while run._link is not None and run._link.stop is None:
        assert time.monotonic() < ends_s
        time.sleep(0.01)
