"""The parts of a survivor that outlive the loss of a peer: loader processes, and copies in other machines' memory."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from in_place_runs import FIRST, folder, lines
from zmq_agent import FakeAgent, Start

from atoll.v1.common_pb2 import VIEW_STAGE_BROKEN

pytestmark = pytest.mark.timeout(240)


@contextmanager
def ending_what_is_left(secret: str) -> Iterator[None]:
    """Loader processes outlive a worker that is killed; the secret of its launch shows an agent whose they are."""
    try:
        yield
    finally:
        mark = f"ATOLL_WORKER_SECRET={secret}".encode()
        for environ in Path("/proc").glob("[0-9]*/environ"):
            with suppress(OSError):
                if mark in environ.read_bytes():
                    os.kill(int(environ.parent.name), signal.SIGKILL)


def test_loader_processes_and_copies_in_memory_go_on_in_the_next_view(tmp_path: Path, start: Start) -> None:
    """1. Three workers on three machines keep each other's state in memory. 2. One dies (SIGKILL); the others go on in
    the next view, where their loaders' processes fetched batches ahead by the old shares. 3. Each batch comes once more
    or once, in order, and generations of the new view's steps are complete in memory."""
    out = folder(tmp_path, "out")
    with FakeAgent(out, world_size=3, start=start) as agent, ending_what_is_left(agent.secret):
        agent.shares, agent.makes_views = FIRST, True
        agent.place(["a", "b", "c"], ["site", "site", "site"])
        agent.spec.checkpoint.memory_replicas = 2
        agent.own_directories, agent.memory = True, out / "memory"
        agent.start_workers("in_place.py", str(out), "--kill-rank", "1", "--kill-step", "13", "--kill-at", "forward",
                            "--workers", "2", "--often")  # fmt: skip
        agent.wait_for_stage(1, VIEW_STAGE_BROKEN, 0, 2)
        agent.send_view(2, [0, 2], [1.0, 1.0], plan_id=2)
        agent.put_in_force()
        codes = agent.exit_codes()
        assert [codes[0], codes[2]] == [0, 0], agent.said()
        assert min(agent.memory_steps[rank] for rank in (0, 2)) > 13
    for rank in (0, 2):
        assert [line["step"] for line in lines(out, rank)] == list(range(27))
    after = [line for rank in (0, 2) for line in lines(out, rank) if line["step"] >= 13 and line["epoch"] == 2]
    assert sorted(id_ for line in after for id_ in line["ids"]) == list(range(100))
