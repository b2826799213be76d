"""A rank that takes the same tensor from rank 0; what it says is one word a line. Told `abort` in the file of its last
argument, it does."""

from __future__ import annotations

import os
import sys
import threading

import torch
import torch.distributed as dist

from atoll.agent.runtime.agent_link.place import WorkerPlace
from atoll.agent.runtime.transport import meeting
from atoll.agent.runtime.transport.process_groups import Group
from atoll.errors import PeerLost

ENTRIES = 1 << 26


def say(*words: object) -> None:
    print(*words, flush=True)


def watch(flat: torch.Tensor, over: threading.Event) -> None:
    while flat[0] == 0:
        if over.wait(0.0005):
            return
    say("begun")


def send_slowly() -> None:
    """Where others want the processors too: whoever shall see half of it has them first."""
    for thread in os.listdir("/proc/self/task"):
        os.setpriority(os.PRIO_PROCESS, int(thread), 19)


def obey(group: Group) -> None:
    with open(sys.argv[2]) as told:
        assert told.readline() == "abort\n"
    group.abort()


def take(group: Group, flat: torch.Tensor, way: str) -> None:
    if way == "broadcast":
        group.level(flat, "taking it")
    else:
        group.distribute(flat.view(torch.uint8).numpy(), flat.nbytes, [(0, 1)])


def main() -> None:
    place = WorkerPlace.from_environment()
    group = meeting.join(place, torch.device("cpu"), abortable=True)
    assert group is not None
    way, over = sys.argv[1], threading.Event()
    flat = torch.ones(ENTRIES) if place.is_main else torch.zeros(ENTRIES)
    if place.is_main:
        send_slowly()
    else:
        threading.Thread(target=watch, args=(flat, over), daemon=True).start()
        threading.Thread(target=obey, args=(group,), daemon=True).start()
    try:
        take(group, flat, way)
        say("whole")
    except PeerLost as error:
        say("half" if flat[-1] == 0 else "whole", error)
    over.set()
    say("closed", group.close_within(4.0), dist.is_initialized())
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    dist.all_reduce(torch.ones(3))
    dist.destroy_process_group()
    say("again")


main()
