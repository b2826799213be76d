"""Whole runs of a model whose forward pass writes what does not train. Real worker processes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from moving_model import check, plain_states
from zmq_agent import FakeAgent, Start

from atoll.agent.runtime.checkpoints.disk import files, listing
from atoll.agent.runtime.checkpoints.disk.state import unpack_state

pytestmark = pytest.mark.timeout(240)
STEPS = 12


@pytest.mark.parametrize("watched", [False, True], ids=["copied", "seen to move"])
def test_what_the_forward_pass_writes_is_of_one_step_in_every_checkpoint(
    tmp_path: Path, start: Start, watched: bool
) -> None:
    """1. A momentum encoder, counters in parameters and buffers, a buffer that grows, one that is None at first, one
    that comes later, an average that is tracked. 2. Checkpoints read them while the next forward pass writes. 3. Every
    one on disk is of one step, as plain torch has it. 4. All machines are lost; the run goes on from memory, from that
    very state, and ends where plain torch does."""
    plain = plain_states(STEPS)
    more = ("--watched",) if watched else ()
    with FakeAgent(tmp_path, world_size=2, start=start) as agent:
        agent.spec.checkpoint.every_steps, agent.spec.checkpoint.keep, agent.memory = 1, 50, tmp_path / "memory"
        agent.spec.checkpoint.memory_replicas = 1
        agent.start_workers("moving_state.py", str(tmp_path), "--await-stop-at", "9", *more)
        agent.lose_power(5)
        assert not agent.warnings
    found = listing.newest(agent.job_directory)
    assert len(found) >= 5
    for one in found:
        checkpoint = files.read(one.path)
        states = unpack_state(checkpoint.tensors, checkpoint.scalars)
        check(states["model"], states["tracked.average"], one.step, plain)
        one.path.rename(tmp_path / one.path.name)  # so that the next run takes what is in memory
    with FakeAgent(tmp_path, run=2, world_size=2, start=start) as agent:
        agent.memory, agent.spec.checkpoint.memory_replicas = tmp_path / "memory", 1
        agent.start_workers("moving_state.py", str(tmp_path), *more)
        assert agent.exit_codes() == [0, 0], agent.said()
    for rank in range(2):
        step, state, tracked = torch.load(tmp_path / f"resumed-2-{rank}.pt", weights_only=True)
        assert step >= 5
        check(state, tracked, step, plain)
        step, state, tracked = torch.load(tmp_path / f"ended-2-{rank}.pt", weights_only=True)
        assert step == STEPS
        check(state, tracked, step, plain)
