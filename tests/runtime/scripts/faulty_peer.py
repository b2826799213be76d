"""A rank that dies or lies in place of sending a message."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import atoll
from atoll.agent.runtime.channel.channel import Channel


def _stepped(lines: Path, step: int) -> bool:
    """Whether a rank has written that it made this step."""
    return lines.exists() and any(json.loads(line)["step"] == step for line in lines.read_text().splitlines(True)[-2:])


@contextmanager
def faulty(
    run: atoll.Run, fault: str, lying: Callable[[memoryview, str], bytes], told: Path | None = None
) -> Iterator[None]:
    """Rank 1 does so, where `fault` says STEP:STAGE:WHAT. `die`: before its first message of that; `die between`:
    before its second one; `die behind`: the same, once rank 0 has written in `told` that it made this step. lying: what
    it sends in place of a message."""
    if run.rank != 1 or not fault:
        yield
        return
    step, stage, what = fault.split(":")
    real, sent = Channel.send, 0

    def send(  # noqa: PLR0917 - as Channel.send
        self: Channel, to: int, number: int, tensor: int, count: int, payload: Any
    ) -> None:
        nonlocal sent
        if (run.step, count) == (int(step), int(stage)):
            sent += 1
            if what == "die" or (what.startswith("die ") and sent == 2):
                while what == "die behind" and told is not None and not _stepped(told, int(step)):
                    time.sleep(0.005)
                os.kill(os.getpid(), signal.SIGKILL)
            elif not what.startswith("die"):
                payload = lying(memoryview(payload), what)
        real(self, to, number, tensor, count, payload)

    Channel.send = send  # type: ignore[method-assign]
    try:
        yield
    finally:
        Channel.send = real  # type: ignore[method-assign]
