"""Whole runs whose ranks write a shard each of checkpoints on disk. Real worker processes."""

from __future__ import annotations

import re
import signal
from pathlib import Path

import pytest
from zmq_agent import FakeAgent, Start

from atoll.agent.runtime.checkpoints.disk import listing

pytestmark = pytest.mark.timeout(240)
ARGUMENTS = ("--epochs", "6", "--adam")


def test_a_run_of_another_size_goes_on_from_shards(tmp_path: Path, start: Start) -> None:
    """1. Three ranks reach one directory and write a shard each at step 8. 2. All are killed (SIGKILL). 3. Two go on
    from it, to the end."""
    with FakeAgent(tmp_path, run=1, world_size=3, job="tiny-test", start=start) as agent:
        agent.spec.checkpoint.every_steps = 8
        agent.start_workers("sharded_regression.py", str(tmp_path), *ARGUMENTS, "--await-stop-at", "12")
        agent.wait_for_step(12)  # where they stay
        agent.wait_until(lambda: bool(listing.newest(agent.job_directory, lambda why: None)))
        for worker in agent.workers:
            worker.send_signal(signal.SIGKILL)
        assert agent.exit_codes() == [-signal.SIGKILL] * 3, agent.said()
        (found,) = listing.newest(agent.job_directory)
        assert len(list(found.path.glob("state-*-of-00003.safetensors"))) == 3
    with FakeAgent(tmp_path, run=2, world_size=2, job="tiny-test", start=start) as agent:
        agent.start_workers("sharded_regression.py", str(tmp_path), *ARGUMENTS)
        assert agent.exit_codes() == [0, 0], agent.said()
        printed = "".join((agent.job_directory / f"run-2-rank-{rank}.log").read_text() for rank in range(2))
        assert set(re.findall(r"resumes from step (\d+)", printed)) == {"8"}
