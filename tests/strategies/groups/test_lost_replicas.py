"""Replicas of strategy groups that are killed in a round, and replaced. Real processes; the test plays agent and
controller."""

from __future__ import annotations

import itertools
import json
import signal
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from scheduled_runs import Scheduling, ended_alike, groups
from zmq_agent import FakeAgent, Start

from atoll.strategies.groups.settings import Groups
from atoll.v1.common_pb2 import VIEW_STAGE_BROKEN, VIEW_STAGE_READY

pytestmark = pytest.mark.timeout(300)

KILLED = -signal.SIGKILL
SAMPLES = 192
EPOCHS = 5


def updates(out: Path, rank: int) -> list[dict[str, Any]]:
    """That this rank made, the last one too where it was killed after it."""
    path = out / f"run-1-rank-{rank}.updates"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def counted(out: Path, ranks: list[int], round_: int) -> Counter[int]:
    """How often these trained each sample in the round, in the newest view of it."""
    lines = [line for rank in ranks for line in updates(out, rank) if line["round"] == round_]
    newest = max((line["view"] for line in lines), default=0)
    return Counter(index for line in lines if line["view"] == newest for index in line["samples"])


def struck(
    tmp_path: Path, start: Start, where: str, *arguments: str, lost: int = 1, grouping: Any = "scheduled"
) -> FakeAgent:
    """Of three replicas one is killed in round 2, the others go on from the boundary after it in view 2, and it is
    replaced in view 3. All end well, and alike."""
    left = [rank for rank in range(3) if rank != lost]
    script = (str(tmp_path), f"--die={lost}:2:{where}", f"--epochs={EPOCHS}", "--update-s=0.04", *arguments)
    with groups(tmp_path, 3, start=start, grouping=grouping) as agent, Scheduling(agent, Groups(grouping=grouping)):
        agent.makes_views = True
        agent.place([f"n{rank}" for rank in range(4)], [f"i{rank % 2}" for rank in range(4)])
        agent.start_workers("groups_train.py", *script)
        assert agent.workers[lost].wait(timeout=120) == KILLED, agent.said()
        agent.send_view(2, left, [1.0, 1.0], plan_id=2, at_boundary=True)
        agent.put_in_force()
        joined = agent.start_joiner("groups_train.py", *script)
        agent.wait_until(lambda: agent.stands_at(joined)[1] == VIEW_STAGE_READY)
        agent.send_view(
            3, [left[0], joined, left[1]], [1.0] * 3, plan_id=3, without_state=[joined], at_boundary=True, in_force=2
        )  # fmt: skip
        agent.put_in_force()
        codes = [0] * 4
        codes[lost] = KILLED
        assert agent.exit_codes() == codes, agent.said()
    ended_alike(tmp_path, (*left, joined))
    return agent


@pytest.mark.parametrize("where", ["backward", "waiting", "before", "between"])
def test_the_round_goes_on_and_what_the_lost_one_had_for_itself_is_trained_by_others(
    start: Start, tmp_path: Path, where: str
) -> None:
    """1. Rank 1 is killed in its first batch of round 2: in a pass, while it waits for a group, before its average; or
    between the rounds. 2. The others make that round whole without it, or do not begin it, and nobody goes back.
    3. They leave for view 2 at the boundary; the lost one is replaced in view 3. 4. Each sample counts once."""
    agent = struck(tmp_path, start, where)
    if where != "between":
        assert all(
            stand.step == 3 for rank in (0, 2) for stand in agent.stands[rank] if stand.stage == VIEW_STAGE_BROKEN
        )
    for round_ in {line["round"] for line in updates(tmp_path, 0)}:
        ranks = [0, 1, 2, 3] if round_ != 2 else [0, 2]
        assert set(counted(tmp_path, ranks, round_).values()) == {1}, round_
    everyone = Counter(
        index for round_ in {line["round"] for line in updates(tmp_path, 0)} for index in
        counted(tmp_path, [0, 1, 2, 3] if round_ != 2 else [0, 2], round_).elements()
    )  # fmt: skip
    assert everyone == dict.fromkeys(range(SAMPLES), EPOCHS)


@pytest.mark.parametrize(
    ("where", "lost"),
    [*itertools.product(("during", "after", "during-end"), (0, 1)), ("before-end", 0), ("after-end", 1)],
)
def test_an_average_that_loses_a_member_is_with_it_on_all_or_on_none(
    start: Start, tmp_path: Path, where: str, lost: int
) -> None:
    """1. Rank 0 or 1 is killed around an average of all in round 2: after some of its messages, or when it has made it;
    or around that of the round's end. 2. The others' results are with it or without it, the same on both: what it had
    trained they train again in the latter case alone."""
    struck(tmp_path, start, where, "--die-after=3", "--tell-groups", lost=lost, grouping="all")
    left = [rank for rank in range(3) if rank != lost]
    own = Counter(index for line in updates(tmp_path, lost) if line["round"] == 2 for index in line["samples"])
    others = counted(tmp_path, left, 2)
    assert set(others.values()) == {1}
    in_round = len(others) + sum(own[index] for index in own if index not in others)
    assert in_round == len(counted(tmp_path, [0, 1, 2], 1))
    told = [(tmp_path / f"run-1-rank-{rank}.groups").read_text().splitlines() for rank in left]
    in_two = [[line for line in each if line.startswith("2 ")] for each in told]
    assert in_two[0] == in_two[1]
    if where == "after":
        assert in_two[0][0] == "2 1 [0, 1, 2]"
        assert not set(own) & set(others)


def test_a_replica_that_only_stood_still_hears_that_the_other_one_goes_on_without_it(
    start: Start, tmp_path: Path
) -> None:
    """1. Rank 1 is stopped (SIGSTOP) for so long that rank 0 loses it, makes its round alone and waits for a view.
    2. It wakes, and waits for a group with rank 0. 3. The scheduler tells it that rank 0 goes on without it: it ends
    its round. 4. Both train to the end in view 2, no sample twice in a round, and end alike."""
    with groups(tmp_path, 2, start=start, grouping="all") as agent, Scheduling(agent, Groups(grouping="all")):
        agent.makes_views = True
        agent.start_workers("groups_train.py", str(tmp_path), f"--epochs={EPOCHS}", "--update-s=0.02")
        agent.wait_for_step(2)
        agent.workers[1].send_signal(signal.SIGSTOP)
        agent.wait_for_stage(1, VIEW_STAGE_BROKEN, 0)
        agent.workers[1].send_signal(signal.SIGCONT)
        agent.wait_for_stage(1, VIEW_STAGE_BROKEN, 1)
        agent.send_view(2, [0, 1], [1.0, 1.0], plan_id=2)
        agent.put_in_force()
        assert agent.exit_codes() == [0, 0], agent.said()
    ended_alike(tmp_path, (0, 1))
    (broken_off,) = {stand.step for stand in agent.stands[1] if stand.stage == VIEW_STAGE_BROKEN}
    for round_ in {line["round"] for line in updates(tmp_path, 0)}:
        ranks = [0, 1] if round_ != broken_off else [0]
        assert set(counted(tmp_path, ranks, round_).values()) == {1}, round_
