"""The end of a process group whose collectives do not come back."""

from __future__ import annotations

import os
import signal
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Final, cast

import pytest
import torch
import torch.distributed as dist
from held_ports import free_port
from zmq_agent import Start

from atoll.agent.runtime.transport.collectives import Aborted, UnderWay, collective
from atoll.agent.runtime.transport.meeting import share_a_gpu
from atoll.agent.runtime.transport.process_groups import Group
from atoll.errors import PeerLost

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


class Kernel:
    """An NCCL collective: its kernel runs until `ended`, also where an abort is what ends it, and `wait` is silent."""

    def __init__(self) -> None:
        self.ended = False

    def under_way(self, aborted: Aborted, timeout_s: float = 60.0) -> UnderWay:
        return UnderWay(cast("dist.Work", self), "combining gradients", aborted, timeout_s)

    def is_completed(self) -> bool:
        return self.ended

    def wait(self) -> bool:
        assert self.ended, "the current stream would follow a kernel that may never end"
        return True


def test_a_sum_of_nccl_that_an_abort_ended_is_a_lost_peer() -> None:
    """1. A peer dies in the backward pass. 2. The abort ends NCCL's kernel, and its `wait` says nothing. 3. What the
    kernel left in the gradients must not reach the optimizer."""
    whole, cut, late = Kernel(), Kernel(), Kernel()
    aborted = Aborted()
    whole.ended = True
    whole.under_way(aborted).wait()

    def abort() -> None:
        aborted.say()
        cut.ended = True

    ending = threading.Timer(0.05, abort)
    ending.start()
    try:
        with pytest.raises(PeerLost, match="combining gradients: its group was aborted"):
            cut.under_way(aborted).wait()
    finally:
        ending.join()
    with pytest.raises(PeerLost, match="aborted"):
        late.under_way(aborted).wait()  # the device does not answer to the abort either
    with pytest.raises(PeerLost, match="did not finish within 0 s"):
        late.under_way(Aborted(), timeout_s=0.01).wait()


def test_a_broken_device_is_no_lost_peer() -> None:
    with pytest.raises(torch.AcceleratorError), collective("combining gradients"):
        raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered")


@pytest.mark.parametrize(("way", "sent_with"), [("broadcast", signal.SIGSTOP), ("hand-over", signal.SIGKILL)])
def test_a_message_that_came_by_half_is_left_behind(
    way: str, sent_with: signal.Signals, tmp_path: Path, start: Start
) -> None:
    """1. A rank is stopped, or killed, while it sends a large tensor. 2. The other has half of it, is told to abort,
    and its collective has failed soon after, though gloo does not wake it: its timeout is minutes. 3. The group is
    left, the process makes another, and ends."""
    place = {**os.environ, "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    for name in ("says", "told"):
        os.mkfifo(tmp_path / name)
    command = [sys.executable, str(SCRIPTS / "half_received.py"), way, str(tmp_path / "told")]
    with (
        open(tmp_path / "says", "r+b", buffering=0) as says,
        open(tmp_path / "told", "r+b", buffering=0) as told,
        ExitStack() as stack,
    ):
        ranks = []
        for rank in range(2):
            ranks.append(start(command, {**place, "RANK": str(rank)}, says if rank else None))
            stack.callback(ranks[-1].kill)
        sender, receiver = ranks
        assert says.readline() == b"begun\n"
        sender.send_signal(sent_with)
        told.write(b"abort\n")
        said = [says.readline().decode().strip() for _ in range(3)]
        assert said[0].startswith("half "), said
        assert said[1:] == ["closed True False", "again"]
        assert receiver.wait(timeout=30) == 0


@pytest.mark.parametrize(("uuids", "shared"), [(("a", "b", "c"), False), (("a", "b", "a"), True), (("a",), False)])
def test_ranks_on_one_gpu_know_it_alike(uuids: tuple[str, ...], shared: bool) -> None:
    """NCCL refuses two ranks on one GPU ("Duplicate GPU detected"); they meet by gloo."""
    store, size = dist.HashStore(), len(uuids)
    with ThreadPoolExecutor(size) as ranks:
        found = [ranks.submit(share_a_gpu, store, rank, size, uuids[rank]) for rank in reversed(range(size))]
        assert [one.result(timeout=30) for one in found] == [shared] * size
