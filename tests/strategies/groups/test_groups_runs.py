"""Whole runs of strategy groups: real worker processes, the real scheduler behind an agent. Each test is a story."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from scheduled_runs import Scheduling, ended_alike, groups, rounds
from zmq_agent import Start

from atoll.strategies.groups.settings import Groups

pytestmark = pytest.mark.timeout(300)


def samples_of_epochs(out: Path, world_size: int, epochs: int, samples: int = 192, run: int = 1) -> None:
    """Each sample was trained once an epoch, by whomever."""
    counted = Counter(
        index for rank in range(world_size) for line in rounds(out, rank, run) for index in line["samples"]
    )
    assert counted == dict.fromkeys(range(samples), epochs)


@pytest.mark.parametrize(("grouping", "optimizer"), [("scheduled", "sgd"), ("pairs", "adamw"), ("static", "sgd")])
def test_replicas_of_unequal_speed_train_every_sample_once_and_end_alike(
    start: Start, tmp_path: Path, grouping: Any, optimizer: str
) -> None:
    """1. Four replicas, one three times slower, on two islands. 2. By every rule each sample is trained once an epoch,
    all ranks tell the same losses, and end with the same weights and moments to the bit. 3. Where nobody waits for the
    slow one in every iteration it trains less than the others."""
    settings = Groups(grouping=grouping)
    arguments = ["--update-s=0.02", "--slow-rank=2", f"--optimizer={optimizer}"]
    with groups(tmp_path, 4, start=start, grouping=grouping) as agent, Scheduling(agent, settings) as scheduling:
        agent.start_workers("groups_train.py", str(tmp_path), *arguments)
        assert agent.exit_codes() == [0] * 4, agent.said()
    ended_alike(tmp_path, range(4))
    samples_of_epochs(tmp_path, 4, epochs=2)
    told = [[line["loss"] for line in rounds(tmp_path, rank)] for rank in range(4)]
    assert told[0] == told[1] == told[2] == told[3]
    assert told[0][-1] < told[0][0]
    counts = [sum(len(line["samples"]) for line in rounds(tmp_path, rank)) for rank in range(4)]
    sizes = {len(answer.members) for answer in scheduling.groups}
    if grouping == "scheduled":
        assert counts[2] < min(counts[0], counts[1], counts[3])
    else:
        assert sizes <= {1, 2}
        assert 2 in sizes


def test_without_a_controller_replicas_train_alone_until_the_rounds_end(start: Start, tmp_path: Path) -> None:
    """1. The controller goes away in the middle: after 3 s nobody waits for it any more. 2. Another leads, and answers
    what is asked from then on. 3. Nothing was lost, and all end alike."""
    with groups(tmp_path, 3, start=start) as agent, Scheduling(agent, Groups()) as scheduling:
        agent.start_workers("groups_train.py", str(tmp_path), "--update-s=0.02", "--epochs=8")
        agent.wait_for_step(5)
        before = scheduling.leave()
        agent.wait_for_step(max(agent.alive[0][0], 5) + 6)
        assert len(scheduling.groups) == before
        scheduling.another()
        agent.wait_until(lambda: len(scheduling.groups) > before)
        assert agent.exit_codes() == [0] * 3, agent.said()
    ended_alike(tmp_path, range(3))
    samples_of_epochs(tmp_path, 3, epochs=8)


def test_an_answer_that_one_member_never_gets_leaves_it_out_for_all(start: Start, tmp_path: Path) -> None:
    """1. Rank 1's third signal is answered with a group of all, and the answer is lost, however often it is asked for.
    2. After 3 s rank 1 goes on and declines; ranks 0 and 2 average without it, both. 3. All end alike."""
    agent = groups(tmp_path, 3, start=start, grouping="all")
    with agent, Scheduling(agent, Groups(grouping="all")) as scheduling:
        scheduling.lost.add((1, 3))
        agent.start_workers("groups_train.py", str(tmp_path), "--round-batches=8", "--tell-groups")
        assert agent.exit_codes() == [0] * 3, agent.said()
    ended_alike(tmp_path, range(3))
    samples_of_epochs(tmp_path, 3, epochs=2)
    averaged = [(tmp_path / f"run-1-rank-{rank}.groups").read_text().splitlines() for rank in range(3)]
    assert averaged[0][2] == averaged[2][2] == "0 3 [0, 2]"  # round, group, members
    assert "0 3 " not in "".join(averaged[1])
    assert averaged[0][:2] == averaged[1][:2] == averaged[2][:2] == ["0 1 [0, 1, 2]", "0 2 [0, 1, 2]"]


def test_where_no_views_are_made_the_others_make_the_round_without_a_lost_one_save_it_and_leave(
    start: Start, tmp_path: Path
) -> None:
    """1. Rank 1 is killed in round 2, before its first average there; nobody says that the run may go on in place. 2.
    The others train what it had, save the round, and leave. 3. The next run goes on from there: every sample counts
    once, and all end alike."""
    with groups(tmp_path, 3, start=start) as agent, Scheduling(agent, Groups()):
        agent.start_workers("groups_train.py", str(tmp_path), "--die=1:2:before")
        assert agent.exit_codes() == [75, -9, 75], agent.said()
    assert [line["round"] for line in rounds(tmp_path, 0)] == [0, 1, 2]
    with groups(tmp_path, 2, start=start, run=2) as agent, Scheduling(agent, Groups()):
        agent.start_workers("groups_train.py", str(tmp_path))
        assert agent.exit_codes() == [0] * 2, agent.said()
    assert rounds(tmp_path, 0, run=2)[0]["round"] == 3
    ended_alike(tmp_path, range(2), run=2)
    lines = [line for run, size in ((1, 3), (2, 2)) for rank in range(size) for line in rounds(tmp_path, rank, run)]
    counted = Counter(index for line in lines for index in line["samples"])
    assert counted == dict.fromkeys(range(192), 2)


def test_what_cannot_be_is_refused_by_name(start: Start, tmp_path: Path) -> None:
    for flaw, said in (
        ("--micro-batches=3", "batch_size = 4 cannot be split into 3 micro-batches of equal size"),
        ("--optimizer=adagrad", "cannot average what Adagrad keeps. Use SGD, Adam or AdamW"),
        ("--optimizer=amsgrad", "cannot average the state of amsgrad or dampening"),
        ("--flaw=triples", "dataset or collate_fn have to give (inputs, targets), and gave a list of 3"),
        ("--flaw=losses", "the loss has shape (4, 2); it must be one number"),
        ("--flaw=prepare", "call run.prepare_pipeline in place of run.prepare"),
        ("--flaw=bfloat16", "averages float32, and 0.weight is torch.bfloat16"),
    ):
        out = tmp_path / flaw.strip("-")
        out.mkdir()
        with groups(out, 1, start=start) as agent:
            agent.start_workers("groups_train.py", str(out), flaw)
            assert agent.exit_codes() == [1], flaw
            assert said in agent.said()
