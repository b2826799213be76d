"""What does not go smoothly when a worker is lost: silence, losses while a view is formed, ranks that are one update
apart, what cannot go on in place. Real processes, gloo and signals; the test plays agent and controller."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
import torch
from in_place_runs import FIRST, folder, lines, same
from zmq_agent import FakeAgent, Start

from atoll.agent.runtime.checkpoints.disk import listing
from atoll.v1.common_pb2 import (
    VIEW_STAGE_BROKEN,
    VIEW_STAGE_FAILED,
    VIEW_STAGE_FORMING,
    VIEW_STAGE_TRAINING,
    VIEW_STAGE_UNABLE,
)

pytestmark = pytest.mark.timeout(240)

KILLED = -signal.SIGKILL


def of_three(out: Path, start: Start) -> FakeAgent:
    agent = FakeAgent(out, world_size=3, start=start)
    agent.shares, agent.makes_views = FIRST, True
    return agent


def test_a_silent_peer_is_left_behind_and_writes_nothing_when_it_wakes(tmp_path: Path, start: Start) -> None:
    """1. Rank 2 stands still (SIGSTOP) inside a backward pass: no connection ends, the others wait in a collective. 2.
    A view without it comes: their collectives are ended, and they go on. 3. Rank 2 wakes: it finds its view broken, and
    the next one without it; it leaves with 85 and writes no checkpoint."""
    out = folder(tmp_path, "out")
    with of_three(out, start) as agent:
        agent.start_workers("in_place.py", str(out), "--kill-rank", "2", "--kill-step", "5", "--kill-at", "backward",
                            "--stop-in-place", "--epochs", "2")  # fmt: skip
        agent.wait_until(lambda: agent.alive.get(0, (0, 0))[0] >= 5)
        agent.send_view(2, [0, 1], [1.0, 1.0], plan_id=2, to=[0, 1, 2])
        agent.put_in_force()
        assert [agent.workers[rank].wait(timeout=60) for rank in (0, 1)] == [0, 0], agent.said()
        written = {one.path for one in listing.newest(agent.job_directory)}
        agent.workers[2].send_signal(signal.SIGCONT)
        assert agent.workers[2].wait(timeout=60) == 85, agent.said()
        assert {one.path for one in listing.newest(agent.job_directory)} == written != set()
    assert lines(out, 0)[-1]["step"] == 17


def test_a_loss_while_a_view_is_formed_ends_in_the_one_after_it(tmp_path: Path, start: Start) -> None:
    """1. Rank 1 is killed. 2. The next view is of ranks 0 and 2; before 2 hears of it, it is killed too: rank 0 meets
    nobody and says so by its deadline. 3. View 3 is of rank 0 alone: it trains to the end, each sample once."""
    out = folder(tmp_path, "out")
    with of_three(out, start) as agent:
        agent.start_workers("in_place.py", str(out), "--kill-rank", "1", "--kill-step", "5", "--kill-at", "forward",
                            "--epochs", "2")  # fmt: skip
        agent.wait_for_stage(1, VIEW_STAGE_BROKEN, 0, 2)
        agent.workers[2].send_signal(signal.SIGKILL)
        agent.workers[2].wait(timeout=30)
        agent.send_view(2, [2, 0], [1.0, 1.0], plan_id=2, meet_s=2.0, to=[0])
        agent.wait_for_stage(2, VIEW_STAGE_FAILED, 0)
        agent.send_view(3, [0], [1.0], plan_id=3)
        agent.put_in_force()
        assert agent.exit_codes() == [0, KILLED, KILLED], agent.said()
        said = [(one.view, one.stage) for one in agent.stands[0]]
        assert [one for one in said if one[0] == 2] == [(2, VIEW_STAGE_FORMING), (2, VIEW_STAGE_FAILED)]
    alone = [line for line in lines(out, 0) if line["view"] == 3]
    assert [line["step"] for line in alone] == list(range(5, 18))
    assert all(len(line["ids"]) in (12, 4) for line in alone)


def test_a_meeting_is_given_up_as_soon_as_a_newer_view_is_there(tmp_path: Path, start: Start) -> None:
    """1. Rank 1 is killed. 2. Rank 0 forms the next view with rank 2, which was killed meanwhile; the meeting may take
    100 s. 3. A view without rank 2 comes: rank 0 goes into that one at once, and never says that the other failed."""
    out = folder(tmp_path, "out")
    with of_three(out, start) as agent:
        agent.start_workers("in_place.py", str(out), "--kill-rank", "1", "--kill-step", "5", "--kill-at", "forward",
                            "--epochs", "2")  # fmt: skip
        agent.wait_for_stage(1, VIEW_STAGE_BROKEN, 0, 2)
        agent.workers[2].send_signal(signal.SIGKILL)
        agent.workers[2].wait(timeout=30)
        agent.send_view(2, [0, 2], [1.0, 1.0], plan_id=2, meet_s=100.0, to=[0])
        agent.wait_for_stage(2, VIEW_STAGE_FORMING, 0)
        agent.send_view(3, [0], [1.0], plan_id=3)
        agent.put_in_force()
        assert agent.exit_codes() == [0, KILLED, KILLED], agent.said()
        assert VIEW_STAGE_FAILED not in [one.stage for one in agent.stands[0]]


def test_one_loss_after_the_other_down_to_one(tmp_path: Path, start: Start) -> None:
    """1. Rank 0, where the others met, is killed, then rank 2 in the view after it. 2. Rank 1 goes on each time, as
    rank 0 of what is left, in the same process."""
    out = folder(tmp_path, "out")
    with of_three(out, start) as agent:
        agent.start_workers("in_place.py", str(out), "--epochs", "400", "--sleep-s", "0.01")
        agent.wait_for_step(3)
        agent.workers[0].send_signal(signal.SIGKILL)
        agent.wait_for_stage(1, VIEW_STAGE_BROKEN, 1, 2)
        agent.send_view(2, [1, 2], [1.0, 2.0], plan_id=2)
        agent.put_in_force()
        here = agent.alive[1][0]
        agent.wait_until(lambda: agent.alive[1][0] > here + 3)
        agent.workers[2].send_signal(signal.SIGKILL)
        agent.wait_for_stage(2, VIEW_STAGE_BROKEN, 1)
        agent.send_view(3, [1], [1.0], plan_id=3, in_force=2)
        agent.put_in_force()
        agent.send_stop(1)
        assert agent.exit_codes() == [KILLED, 85, KILLED], agent.said()
    views = [line["view"] for line in lines(out, 1)]
    assert set(views) == {1, 2, 3}
    assert views == sorted(views)
    assert [line["step"] for line in lines(out, 1)] == list(range(len(views)))


def test_who_is_an_update_behind_takes_the_state_of_who_is_ahead(tmp_path: Path, start: Start) -> None:
    """1. Rank 2 dies after its gradients left: rank 0 has all parts of step 5 and makes the update, of rank 1's
    the last does not come back. 2. They meet: rank 1 takes the state of step 6 from rank 0; nobody trains step 5
    again. 3. Both end with the same bits."""
    out = folder(tmp_path, "out")
    with of_three(out, start) as agent:
        agent.start_workers("in_place.py", str(out), "--kill-rank", "2", "--kill-step", "5", "--kill-at", "update",
                            "--behind", "1", "--per-batch", "--scaler", "--epochs", "2")  # fmt: skip
        agent.wait_for_stage(1, VIEW_STAGE_BROKEN, 0, 1)
        assert [agent.stands[rank][-1].step for rank in (0, 1)] == [6, 5]
        agent.send_view(2, [0, 1], [1.0, 1.0], plan_id=2)
        agent.put_in_force()
        assert agent.exit_codes() == [0, 0, KILLED], agent.said()
        assert any("takes the state of step 6 from rank 0" in one.text for one in agent.notices)
    states = [torch.load(out / f"rank-{rank}.pt", weights_only=True) for rank in (0, 1)]
    assert same(states[0], states[1])
    assert [line["view"] for line in lines(out, 0)] == [line["view"] for line in lines(out, 1)]


def test_what_cannot_go_on_in_place_says_why_and_ends_as_ever(tmp_path: Path, start: Start) -> None:
    """1. A script whose scheduler the run does not know loses a peer. 2. The survivors say that they are unable and
    why, save the step that was complete and end with 75, with no view and no stop."""
    out = folder(tmp_path, "out")
    with of_three(out, start) as agent:
        agent.start_workers("in_place.py", str(out), "--kill-rank", "1", "--kill-step", "5", "--kill-at", "backward",
                            "--untracked")  # fmt: skip
        assert agent.exit_codes() == [75, KILLED, 75], agent.said()
        assert [agent.stands[rank][-1].stage for rank in (0, 2)] == [VIEW_STAGE_UNABLE] * 2
        assert "scheduler=" in agent.stands[0][-1].reason
        assert [one.step for one in listing.newest(agent.job_directory)] == [5]


def test_who_stands_still_obeys_a_stop_with_what_the_last_boundary_left(tmp_path: Path, start: Start) -> None:
    """1. A peer is lost; the controller decides that the run starts again. 2. The survivors, who wait for a view, save
    the step that was complete and end with 75 at once."""
    out = folder(tmp_path, "out")
    with of_three(out, start) as agent:
        agent.start_workers("in_place.py", str(out), "--kill-rank", "1", "--kill-step", "5", "--kill-at", "backward")
        agent.wait_for_stage(1, VIEW_STAGE_BROKEN, 0, 2)
        for rank in (0, 2):
            agent.send_stop(rank)
        # In 60 s, not the 120 of who hears nothing.
        assert agent.exit_codes(deadline_s=60) == [75, KILLED, 75], agent.said()
        assert [one.step for one in listing.newest(agent.job_directory)] == [5]


def test_checkpoints_count_from_the_step_that_their_view_is_in_force(tmp_path: Path, start: Start) -> None:
    """1. A run that saves every step loses a worker. 2. The next view trains, and is not in force: no checkpoint of its
    steps appears. 3. It comes into force: they do, and say which view they are of. 4. An older view's is refused."""
    out = folder(tmp_path, "out")
    with of_three(out, start) as agent:
        agent.spec.checkpoint.every_steps = 1
        agent.start_workers("in_place.py", str(out), "--epochs", "60", "--sleep-s", "0.02")
        agent.wait_for_step(3)
        agent.wait_until(lambda: agent.checkpoint_step > 0)
        agent.workers[1].send_signal(signal.SIGKILL)
        agent.wait_for_stage(1, VIEW_STAGE_BROKEN, 0, 2)
        agent.send_view(2, [0, 2], [1.0, 1.0], plan_id=2)
        agent.wait_for_stage(2, VIEW_STAGE_TRAINING, 0, 2)
        broken_at = agent.stands[0][-1].step
        agent.wait_until(lambda: min(agent.alive[rank][0] for rank in (0, 2)) > broken_at + 5)
        assert max(one.step for one in listing.newest(agent.job_directory)) <= broken_at
        agent.put_in_force()
        agent.wait_until(lambda: agent.checkpoint_step > broken_at)
        for rank in (0, 2):
            agent.send_stop(rank)
        assert agent.exit_codes() == [85, KILLED, 85], agent.said()
        newest = listing.newest(agent.job_directory)[0]
        assert newest.step > broken_at
        assert (agent.job_directory / "fence").read_text() == "1 2\n"
