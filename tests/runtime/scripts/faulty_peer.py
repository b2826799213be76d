"""A rank that dies or lies in place of sending a message."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import atoll
from atoll.agent.runtime.transport.channel import Channel


@contextmanager
def faulty(run: atoll.Run, fault: str, lying: Callable[[memoryview, str], bytes]) -> Iterator[None]:
    """Rank 1 does so, where `fault` says STEP:STAGE:WHAT. lying: what it sends in place of a message."""
    if run.rank != 1 or not fault:
        yield
        return
    step, stage, what = fault.split(":")
    real = Channel.send

    def send(  # noqa: PLR0917 - as Channel.send
        self: Channel, to: int, number: int, tensor: int, count: int, payload: Any
    ) -> None:
        if (run.step, count) == (int(step), int(stage)):
            if what == "die":
                os.kill(os.getpid(), signal.SIGKILL)
            payload = lying(memoryview(payload), what)
        real(self, to, number, tensor, count, payload)

    Channel.send = send  # type: ignore[method-assign]
    try:
        yield
    finally:
        Channel.send = real  # type: ignore[method-assign]
