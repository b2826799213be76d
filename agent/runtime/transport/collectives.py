"""Waits for collectives, which end when their group was aborted, and what it means that one fails.

gloo wakes nobody for a message that was half received or half sent when its connection ended: such a collective comes
back at its timeout, minutes later. Whoever waits for it leaves it behind: its connections are closed, so that it
touches no tensor any more.

After an abort NCCL's kernels end early, their `wait` returns as if they had succeeded, and the tensors hold garbage.
So every wait ends with a look at the group's flag, which is set before NCCL's abort begins."""

from __future__ import annotations

import math
import re
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Final

import torch
import torch.distributed as dist

from atoll.agent.runtime.agent_link.waiting import waiting
from atoll.errors import PeerLost

LOOKS_S: Final = 0.2  # how often a wait looks at whether its group was aborted
NCCL_POLL_S: Final = 50e-6
"""Time between two queries of an NCCL collective's end. A query takes about 1 us."""
COMES_BACK_S: Final = 0.5  # within which collectives that gloo wakes come back after it

_DEVICE_ERRORS: Final = getattr(torch, "AcceleratorError", ())  # torch before 2.8 raises RuntimeError for them too


@contextmanager
def collective(doing: str) -> Iterator[None]:
    """Turn what torch.distributed raises inside the block into PeerLost."""
    try:
        yield
    except _DEVICE_ERRORS:  # no peer is to blame
        raise
    except RuntimeError as error:  # gloo raises it bare, NCCL and the store subclasses of it
        raise PeerLost(f"{doing}: {_cause(error)}") from error


def _cause(error: RuntimeError) -> str:
    """Return the cause without gloo's source location before it and general advice after it."""
    first_line = next(iter(str(error).strip().splitlines()), type(error).__name__)
    return re.sub(r"^\[[^]]*\]\s*", "", first_line).partition(". This is")[0][:300]


class Aborted:
    """State of a group: whether and when it was aborted. For any thread."""

    def __init__(self) -> None:
        self._at_s = math.inf  # monotonic

    @property
    def said(self) -> bool:
        return self._at_s < math.inf

    def say(self) -> None:
        self._at_s = min(self._at_s, time.monotonic())

    def wait(self, work: dist.Work) -> None:
        """Wait for a gloo collective. Raises RuntimeError as its `wait` does, or because it was aborted."""
        with waiting:
            while True:
                try:
                    work.wait(timedelta(seconds=LOOKS_S))
                except RuntimeError:
                    if work.is_completed():
                        break
                    self._check()
                else:
                    return
            work.wait()  # it may have ended between the two

    def wait_for_nccl(self, work: dist.Work, timeout_s: float) -> None:
        """Wait on the host until the device has finished a collective; the current stream follows it.

        Raises RuntimeError where the communicator failed, the group was aborted or `timeout_s` is over."""
        ends_s = time.monotonic() + timeout_s
        with waiting:
            while not work.is_completed():
                self._check()
                if time.monotonic() > ends_s:
                    raise RuntimeError(f"NCCL did not finish within {timeout_s:.0f} s")
                time.sleep(NCCL_POLL_S)
            work.wait()  # returns at once; with TORCH_NCCL_BLOCKING_WAIT it raises what the communicator reported
        if self.said:
            raise RuntimeError("its group was aborted")

    def run(self, send_or_receive: Callable[[], object]) -> None:
        """Run a call whose gloo handle has no wait with a timeout. Raises as `wait`."""
        failures: list[RuntimeError] = []

        def call() -> None:
            try:
                send_or_receive()
            except RuntimeError as error:
                failures.append(error)

        thread = threading.Thread(target=call, name="atoll-hand-over", daemon=True)
        thread.start()
        with waiting:
            while thread.is_alive():
                thread.join(LOOKS_S)
                if thread.is_alive():
                    self._check()
        if failures:
            raise failures[0]

    def _check(self) -> None:
        if time.monotonic() > self._at_s + COMES_BACK_S:
            raise RuntimeError("its group was aborted")


@dataclass(frozen=True, slots=True)
class UnderWay:
    """A collective."""

    work: dist.Work
    doing: str
    aborted: Aborted  # of its group
    nccl_timeout_s: float | None = None
    """None: gloo carries it, which knows its group's timeout."""

    def wait(self) -> None:
        """Raises PeerLost."""
        with collective(self.doing):
            if self.nccl_timeout_s is None:
                self.aborted.wait(self.work)
            else:
                self.aborted.wait_for_nccl(self.work, self.nccl_timeout_s)

    def then(self, ended: Callable[[object], None]) -> None:
        """Call it, by any thread, once the collective has ended either way."""
        self.work.get_future().add_done_callback(ended)
