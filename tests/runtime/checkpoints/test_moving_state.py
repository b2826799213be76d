"""Whole runs of a model whose forward pass writes what does not train. Real worker processes."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from moving_model import STEPS, State, check, plain_states
from zmq_agent import FakeAgent, Start

from atoll.agent.runtime.checkpoints.disk import files, listing
from atoll.agent.runtime.checkpoints.disk.state import unpack_state
from atoll.v1.common_pb2 import VIEW_STAGE_BROKEN

pytestmark = pytest.mark.timeout(240)


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
        check_kept(tmp_path / f"resumed-2-{rank}.pt", plain, range(5, 10))
        check_kept(tmp_path / f"ended-2-{rank}.pt", plain, [STEPS])


def check_kept(path: Path, plain: list[State], steps: Sequence[int]) -> None:
    step, state, tracked = torch.load(path, weights_only=True)
    assert step in steps
    check(state, tracked, step, plain)


def test_a_step_that_a_loss_broke_counts_once(tmp_path: Path, start: Start) -> None:
    """1. A rank is lost after the forward pass of step 4, which wrote all that does not train. 2. The other one goes
    on in place and ends where plain torch does: that pass counted once, in every kind of state."""
    with FakeAgent(tmp_path, world_size=2, start=start) as agent:
        agent.makes_views = True
        agent.start_workers("moving_state.py", str(tmp_path), "--kill-step", "4")
        agent.wait_for_stage(1, VIEW_STAGE_BROKEN, 0)
        agent.send_view(2, [0], [1.0], plan_id=2)
        agent.put_in_force()
        assert agent.exit_codes() == [0, -signal.SIGKILL], agent.said()
    check_kept(tmp_path / "ended-1-0.pt", plain_states(STEPS), [STEPS])


def test_an_emergency_and_an_epochs_end_leave_one_step_with_and_without_compile(tmp_path: Path, start: Start) -> None:
    """1. A rank is lost after the forward pass of step 4; the other one saves the boundary before it, and leaves.
    2. The next run compiles the model, and ends its epoch. 3. The one after that does not, and shows the epoch's last
    batch again, without effect. 4. Each is where plain torch is."""
    plain = plain_states(2 * STEPS)
    for run, more in enumerate((("--kill-step", "4"), ("--compile",), ("--epochs", "2")), start=1):
        with FakeAgent(tmp_path, run=run, world_size=2 if run == 1 else 1, start=start) as agent:
            agent.start_workers("moving_state.py", str(tmp_path), *more)
            assert agent.exit_codes() == ([75, -signal.SIGKILL] if run == 1 else [0]), agent.said()
            (newest, *_) = listing.newest(agent.job_directory)
            states = unpack_state((checkpoint := files.read(newest.path)).tensors, checkpoint.scalars)
            check(states["model"], states["tracked.average"], (4, STEPS, 2 * STEPS)[run - 1], plain)
    check_kept(tmp_path / "resumed-3-0.pt", plain, [STEPS])
    check_kept(tmp_path / "ended-3-0.pt", plain, [2 * STEPS])
    step, state, tracked = torch.load(tmp_path / "resumed-2-0.pt", weights_only=True)
    check({name.removeprefix("_orig_mod."): value for name, value in state.items()}, tracked, step, plain)
    assert step == 4
