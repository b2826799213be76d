"""Workers join, replace a lost one and leave while the others train. Real processes and gloo; the test plays agent and
controller."""

from __future__ import annotations

import signal
from collections import Counter
from pathlib import Path

import pytest
import torch
from in_place_runs import FIRST, folder, lines, same
from zmq_agent import FakeAgent, Start

from atoll.v1.common_pb2 import VIEW_STAGE_BROKEN, VIEW_STAGE_READY, VIEW_STAGE_TRAINING

pytestmark = pytest.mark.timeout(240)

KILLED = -signal.SIGKILL
SAMPLES = 100


def check_samples_once(out: Path, ranks: int, epochs: int) -> None:
    """By the newest view of each step."""
    all_lines = [line for rank in range(ranks) for line in lines(out, rank)]
    newest: dict[int, int] = {}
    for line in all_lines:
        newest[line["step"]] = max(newest.get(line["step"], 0), line["view"])
    seen: dict[int, Counter[int]] = {epoch: Counter() for epoch in range(epochs)}
    for line in all_lines:
        if line["view"] == newest[line["step"]]:
            seen[line["epoch"]].update(line["ids"])
    assert seen == {epoch: Counter(range(SAMPLES)) for epoch in range(epochs)}


def test_a_worker_joins_at_a_boundary_and_another_leaves_at_one(tmp_path: Path, start: Start) -> None:
    """1. Two workers train; a third starts beside them, says that it is ready, and is taken in by a view that all
    propose in their agreement: no collective is aborted. 2. It has the others' state, at their step. 3. Rank 0 is left
    out by a later view: it leaves at the boundary with exit code 85; the others go on to the end, with equal bits. 4.
    Each sample counts once."""
    out = folder(tmp_path, "out")
    with FakeAgent(out, world_size=2, start=start) as agent:
        agent.shares, agent.makes_views = (6.0, 6.0), True
        arguments = (str(out), "--per-batch", "--scaler", "--epochs", "120", "--sleep-s", "0.005")
        agent.start_workers("in_place.py", *arguments)
        agent.wait_for_step(3)
        joined = agent.start_joiner("in_place.py", *arguments)
        agent.wait_until(lambda: agent.stands_at(joined)[1] == VIEW_STAGE_READY)
        assert all(agent.stands[rank][-1].takes_in for rank in (0, 1))
        agent.send_view(2, [0, 1, joined], FIRST, plan_id=2, without_state=[joined], at_boundary=True)
        agent.put_in_force()
        assert VIEW_STAGE_BROKEN not in [one.stage for rank in (0, 1) for one in agent.stands[rank]]
        here = agent.alive[joined][0]
        agent.wait_until(lambda: agent.alive[joined][0] > here + 3)
        agent.send_view(3, [1, joined], [1.0, 1.0], plan_id=3, at_boundary=True, in_force=2, to=[0, 1, joined])
        assert agent.workers[0].wait(timeout=60) == 85, agent.said()
        agent._view_to = (1, joined)
        agent.put_in_force()
        assert agent.exit_codes(90) == [85, 0, 0], agent.said()
    states = [torch.load(out / f"rank-{rank}.pt", weights_only=True) for rank in (1, joined)]
    assert same(states[0], states[1])
    check_samples_once(out, 3, 120)


def test_a_lost_worker_is_replaced_and_no_bit_is_another(tmp_path: Path, start: Start) -> None:
    """1. Of three workers one dies (SIGKILL). The others stand still: the job wants three. 2. One starts in its stead,
    is ready, and is in the next view, in the place of the lost one. 3. The broken step is trained again by three; at
    the end weights, moments, schedulers, averages and the scaler have the bits of a run that nobody disturbed."""
    arguments = ("--per-batch", "--scaler")
    calm, struck = folder(tmp_path, "calm"), folder(tmp_path, "struck")
    with FakeAgent(calm, world_size=3, start=start) as agent:
        agent.shares = FIRST
        agent.start_workers("in_place.py", str(calm), *arguments)
        assert agent.exit_codes(90) == [0, 0, 0], agent.said()
    with FakeAgent(struck, world_size=3, start=start) as agent:
        agent.shares, agent.makes_views = FIRST, True
        agent.start_workers("in_place.py", str(struck), "--kill-rank", "1", "--kill-step", "13", "--kill-at",
                            "backward", *arguments)  # fmt: skip
        agent.wait_for_stage(1, VIEW_STAGE_BROKEN, 0, 2)
        joined = agent.start_joiner("in_place.py", str(struck), *arguments)
        agent.wait_until(lambda: agent.stands_at(joined)[1] == VIEW_STAGE_READY)
        agent.send_view(2, [0, joined, 2], FIRST, plan_id=2, without_state=[joined])
        agent.put_in_force()
        assert agent.exit_codes(90) == [0, KILLED, 0, 0], agent.said()
        assert agent.stands[joined][-1].stage == VIEW_STAGE_TRAINING
    for rank, before in ((0, 0), (joined, 1), (2, 2)):
        now = torch.load(struck / f"rank-{rank}.pt", weights_only=True)
        then = torch.load(calm / f"rank-{before}.pt", weights_only=True)
        assert same(now, then)
    check_samples_once(struck, 4, 3)
