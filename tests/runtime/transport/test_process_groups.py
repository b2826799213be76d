"""The end of a process group whose collectives do not come back."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final, cast

import pytest
import torch.distributed as dist
from held_ports import free_port

from atoll.agent.runtime.transport.process_groups import Group

SCRIPTS: Final = Path(__file__).parent / "scripts"


class Hanging:
    """In NCCL's place: its abort waits for a device that does not answer."""

    def __init__(self) -> None:
        self.asked, self.answers, self.gave_up = 0, threading.Event(), False

    def abort(self) -> None:
        self.asked += 1
        self.gave_up = not self.answers.wait(60)


def test_an_abort_that_hangs_holds_up_nobody_beyond_the_deadline() -> None:
    """1. The thread that hears of a newer view aborts, and goes on at once. 2. The training thread closes the group: by
    its deadline it knows that this did not come about. 3. The device answers: the group ends, and was aborted once."""
    store, hanging = dist.HashStore(), Hanging()
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    group = Group(0, 1, cast("dist.ProcessGroup", hanging), dist.new_group(backend="gloo"), nccl=True)
    try:
        group.abort()
        assert not group.close_within(0.2)
        assert dist.is_initialized()
    finally:
        hanging.answers.set()
    assert group.close_within(20)
    assert not dist.is_initialized()
    assert (hanging.asked, hanging.gave_up) == (1, False)


@pytest.mark.parametrize(("way", "sent_with"), [("broadcast", signal.SIGSTOP), ("hand-over", signal.SIGKILL)])
def test_a_message_that_came_by_half_is_left_behind(way: str, sent_with: signal.Signals) -> None:
    """1. A rank is stopped, or killed, while it sends a large tensor. 2. The other has half of it, is told to abort,
    and its collective has failed soon after, though gloo does not wake it: its timeout is minutes. 3. The group is
    left, the process makes another, and ends."""
    port = str(free_port())
    place = {**os.environ, "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "OMP_NUM_THREADS": "1"}
    with ExitStack() as stack:
        ranks = []
        for rank in range(2):
            command = [sys.executable, str(SCRIPTS / "half_received.py"), way]
            pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
            ranks.append(stack.enter_context(subprocess.Popen(command, env={**place, "RANK": str(rank)}, **pipes)))
            stack.callback(ranks[-1].kill)
        sender, receiver = ranks
        assert receiver.stdout is not None
        assert receiver.stdin is not None
        assert receiver.stdout.readline() == "begun\n"
        sender.send_signal(sent_with)
        receiver.stdin.write("abort\n")
        receiver.stdin.flush()
        said = [receiver.stdout.readline().strip() for _ in range(3)]
        assert said[0].startswith("half "), said
        assert said[1:] == ["closed True False", "again"]
        assert receiver.wait(timeout=30) == 0
