from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from itertools import count
from types import SimpleNamespace

import pytest
import zmq

from atoll.agent.runtime.checkpoints.memory.cost import cadence
from atoll.agent.runtime.checkpoints.memory.cost.cadence import Contention, ThreadTime, idle_s


def test_idle_time_is_of_the_processors_this_process_may_use() -> None:
    mine = os.sched_getaffinity(0)
    try:
        everyone_s = idle_s()
        os.sched_setaffinity(0, {min(mine)})
        assert idle_s() <= everyone_s + 1.0
    finally:
        os.sched_setaffinity(0, mine)


def test_a_thread_is_found_by_its_name_and_its_work_counts() -> None:
    """Of two threads that work, ZeroMQ's of one context, one is asked for."""
    with zmq.Context() as context, zmq.Context() as other:
        context.set(zmq.THREAD_NAME_PREFIX, 91)
        for each in (context, other):
            pull, push = each.socket(zmq.PULL), each.socket(zmq.PUSH)
            push.connect(f"tcp://127.0.0.1:{pull.bind_to_random_port('tcp://127.0.0.1')}")
            if each is other:
                counted = ThreadTime("91/ZMQ")
                before_s = counted.seconds()
            for _ in range(50):
                push.send(bytes(1 << 20), copy=False)
                pull.recv(copy=False)
            push.close(linger=0)
            pull.close(linger=0)
        assert before_s > 0.0
        assert counted.seconds() - before_s < before_s
    ends_s = time.monotonic() + 30
    while counted.seconds() > 0.0:  # they have ended; the kernel may still list one that was joined
        assert time.monotonic() < ends_s
        time.sleep(0.005)


def test_a_processor_that_others_keep_busy_is_contended(monkeypatch: pytest.MonkeyPatch) -> None:
    """On one processor: while another process works there all the time nothing is idle."""
    monkeypatch.setattr(cadence, "_MIN_INTERVAL_S", 3600.0)
    mine = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {max(mine)})
    busy = subprocess.Popen([sys.executable, "-c", "print(flush=True)\nwhile True: pass"], stdout=subprocess.PIPE)
    try:
        assert busy.stdout is not None
        busy.stdout.readline()
        shared = Contention()
        assert shared.share() == 0.0  # nothing is known yet
        monkeypatch.setattr(cadence, "_MIN_INTERVAL_S", 0.3)
        threading.Event().wait(0.6)
        assert shared.share() > 0.8
    finally:
        os.sched_setaffinity(0, mine)
        busy.kill()
        busy.wait(30)
        assert busy.stdout is not None
        busy.stdout.close()


def test_it_looks_once_a_second_at_most(monkeypatch: pytest.MonkeyPatch) -> None:
    """In time that passes by being asked for: 1 ms each."""
    now_s, looks = count(), list[float]()
    monkeypatch.setattr(cadence, "time", SimpleNamespace(monotonic=lambda: next(now_s) / 1000))
    monkeypatch.setattr(cadence, "idle_s", lambda: looks.append(0.0) or 0.0)
    shared = Contention()
    for _ in range(2500):
        shared.share()
    assert len(looks) == 1 + 2  # as it was made, and each second
