"""Whole runs: real worker processes, gloo between them, a real socket to a test's agent. Each test is one story."""

from __future__ import annotations

import json
import shutil
import signal
import time
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from zmq_agent import FakeAgent, Start, torchrun_like

from atoll.agent.runtime.checkpoints.disk import listing
from atoll.v1.common_pb2 import Plan

pytestmark = pytest.mark.timeout(240)

Line = dict[str, Any]
EPOCHS, STEPS = 6, 54
CHANGE_AT = 25
FIRST, SECOND = (6.0, 4.0, 2.0), (2.0, 4.0, 6.0)


def lines(out: Path, world_size: int = 3) -> list[list[Line]]:
    """By rank, what each trained; of a step that was trained again after a resume, the last time."""
    by_rank = []
    for rank in range(world_size):
        by_step: dict[int, Line] = {}
        for log in sorted(out.glob(f"run-*-rank-{rank}.jsonl")):
            for text in log.read_text().splitlines():
                line = json.loads(text)
                by_step[line["step"]] = line
        by_rank.append([by_step[step] for step in sorted(by_step)])
    return by_rank


def folder(parent: Path, name: str) -> Path:
    path = parent / name
    path.mkdir()
    return path


RAISES = """
import threading
import atoll
run = atoll.init()
threading.Thread(target=threading.Event().wait).start()  # the interpreter waits for it
raise ValueError("a wrong path")
"""


def test_who_raised_and_dies_slowly_is_no_victim_of_its_peers(tmp_path: Path, start: Start) -> None:
    """1. A script raises in start-up; a thread of its own keeps its process alive. 2. Its peers lose it and leave, and
    it is asked to stop. 3. It said that it had lost a peer, and the run's end was told of who noticed first."""
    script = folder(tmp_path, "code") / "raises.py"
    script.write_text(RAISES)
    with FakeAgent(tmp_path, start=start) as agent:
        agent.start_workers(str(script))
        agent.wait_until(lambda: "ValueError: a wrong path" in agent.said())
        agent.send_stop(0, grace_s=0.5)
        assert agent.exit_codes(60) == [1], agent.said()
        assert "ValueError: a wrong path" in agent.said().splitlines()[-1], agent.said()


def check_equals_one_process(by_rank: list[list[Line]]) -> None:
    """Train on whole batches in this process, in the order that the workers logged, with the factors that they saw."""
    generator = torch.Generator().manual_seed(3)
    inputs = torch.randn(100, 8, generator=generator)
    targets = inputs @ torch.randn(8, 1, generator=generator)
    torch.manual_seed(7)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.5)
    seen: dict[int, list[int]] = defaultdict(list)
    epoch = 0
    for step, parts in enumerate(zip(*by_rank, strict=True)):
        assert {(part["step"], part["factor"], part["total_batch"]) for part in parts} == {
            (step, parts[0]["factor"], parts[0]["total_batch"])
        }
        ids = [sample for part in parts for sample in part["ids"]]
        if parts[0]["epoch"] != epoch:
            scheduler.step()
        epoch = parts[0]["epoch"]
        assert parts[0]["lr"] == scheduler.get_last_lr()[0]
        seen[epoch] += ids
        together = sum(part["weight"] * float.fromhex(part["loss"]) for part in parts)
        loss = nn.functional.mse_loss(model(inputs[ids]), targets[ids])
        assert together == pytest.approx(loss.item(), rel=1e-5), step
        loss.backward()
        optimizer.param_groups[0]["lr"] *= parts[0]["factor"]
        optimizer.step()
        optimizer.param_groups[0]["lr"] = scheduler.get_last_lr()[0]
        optimizer.zero_grad()
    assert {epoch: sorted(ids) for epoch, ids in seen.items()} == {epoch: list(range(100)) for epoch in range(EPOCHS)}


def undisturbed(tmp_path: Path, start: Start) -> list[list[Line]]:
    """Shares 6:4:2 to begin with, 2:4:6 from step 25 on."""
    out = folder(tmp_path, "undisturbed")
    with FakeAgent(out, world_size=3, start=start) as agent:
        agent.shares = FIRST
        agent.later_plans = [agent.plan(2, CHANGE_AT, SECOND)]
        agent.start_workers("regression.py", str(out), "--epochs", str(EPOCHS))
        assert agent.exit_codes() == [0, 0, 0], agent.said()
        assert [sample.plan for sample in agent.steps[1]] == [1] * CHANGE_AT + [2] * (STEPS - CHANGE_AT)
        assert [sample.local_batch for sample in agent.steps[0]][:3] == [6, 6, 6]
        assert agent.alive[0] == (STEPS, 2)
        sampled = [sample.step for sample in agent.steps[2] if sample.local_grad_sqnorm > 0]
        assert sampled == list(range(0, STEPS, 10))
        assert all(sample.step_s >= sample.compute_s > 0 for sample in agent.steps[0])
        assert [dict(metrics.values)["epoch"] for metrics in agent.metrics[0]] == list(range(EPOCHS))
        assert agent.checkpoint_step == STEPS
    return lines(out)


def test_stops_and_deaths_leave_no_trace_in_the_losses(tmp_path: Path, start: Start) -> None:
    """1. A run of three unequal workers equals one process with the whole batch. 2. The same job again: one worker is
    asked to stop, all drain at the same step and end with 85. 3. Run 2 goes on; rank 1 is killed (SIGKILL); the others
    save the step that was complete and end with 75, though the script catches every Exception. 4. Run 3 goes on to the
    end. 5. Every loss, learning rate and random number of both jobs has the same bits."""
    expected = undisturbed(tmp_path, start)
    check_equals_one_process(expected)
    assert len(expected[0]) == STEPS

    out = folder(tmp_path, "disturbed")
    arguments = (str(out), "--epochs", str(EPOCHS), "--sleep-s", "0.1")
    with FakeAgent(out, run=1, world_size=3, start=start) as agent:
        agent.shares, agent.later_plans = FIRST, [agent.plan(2, CHANGE_AT, SECOND)]
        agent.start_workers("regression.py", *arguments)
        agent.wait_for_step(5)
        agent.send_stop(2)
        assert agent.exit_codes() == [85, 85, 85], agent.said()
        drained = agent.checkpoint_step
    assert [len(part) for part in lines(out)] == [drained] * 3

    with FakeAgent(out, run=2, world_size=3, start=start) as agent:
        agent.shares, agent.later_plans = plans_after(agent, drained)
        agent.start_workers("regression.py", *arguments, "--own-backward")
        agent.wait_for_step(max(28, drained + 1))
        agent.workers[1].send_signal(signal.SIGKILL)
        assert agent.exit_codes() == [75, -signal.SIGKILL, 75], agent.said()
        saved = agent.checkpoint_step
    assert saved > drained
    assert [len(part) for part in lines(out)[::2]] == [saved, saved]

    with FakeAgent(out, run=3, world_size=3, start=start) as agent:
        agent.shares, agent.later_plans = plans_after(agent, saved)
        agent.start_workers("regression.py", *arguments[:-2])
        assert agent.exit_codes() == [0, 0, 0], agent.said()
    found = lines(out)
    missed = [line for line in expected[1] if line not in found[1]]
    # Rank 1 may have been killed after the all-reduce of a step that counts and before it wrote its line.
    assert missed in ([], [expected[1][saved - 1]])
    assert found == [expected[0], [line for line in expected[1] if line not in missed], expected[2]]


def plans_after(agent: FakeAgent, step: int) -> tuple[Sequence[float], list[Plan]]:
    """What a controller would send to a run that goes on from `step`, so that shares are those of the first run."""
    return (FIRST, [agent.plan(2, CHANGE_AT, SECOND)]) if step < CHANGE_AT else (SECOND, [])


def test_the_batch_and_the_learning_rate_change_and_every_sample_counts_once(tmp_path: Path, start: Start) -> None:
    """1. Three ranks begin with batches of 12. 2. From step 11 on, in the middle of an epoch, plan 2 wants 30 and a
    learning rate 1.5 times the script's; plan 3 wants more than the dataset has: all refuse it alike, rank 0 says so.
    3. Asked to stop, they save. 4. Two ranks go on with 40 samples, from step 24 on with the script's own 12 again.
    5. All of it equals one process with the same batches and rates, and schedulers know nothing of the factors."""
    arguments = (str(tmp_path), "--epochs", str(EPOCHS))
    with FakeAgent(tmp_path, run=1, world_size=3, start=start) as agent:
        agent.shares = FIRST
        agent.later_plans = [
            agent.plan(2, 11, SECOND, total_batch=30, learning_rate_factor=1.5),
            agent.plan(3, 14, FIRST, total_batch=101),
        ]
        agent.start_workers("regression.py", *arguments, "--await-stop-at", "17")
        agent.send_stop_in(17, rank=0)
        assert agent.exit_codes() == [85, 85, 85], agent.said()
        assert agent.checkpoint_step == 18
        for rank, whole in enumerate([5, 10, 15]):
            told = {sample.step: (sample.plan, sample.total_batch, sample.local_batch) for sample in agent.steps[rank]}
            assert [told[step][:2] for step in (10, 11, 12, 14)] == [(1, 12), (2, 30), (2, 30), (3, 30)]
            assert told[14][2] == whole
        (refusal,) = agent.warnings
        assert refusal.startswith("plan 3 cannot be trained: its total batch of 101 is more than the dataset's 100")
    with FakeAgent(tmp_path, run=2, world_size=2, start=start) as agent:
        agent.total_batch, agent.learning_rate_factor = 40, 1.75
        agent.later_plans = [agent.plan(2, 24, (1.0, 1.0))]
        agent.start_workers("regression.py", *arguments)
        assert agent.exit_codes() == [0, 0], agent.said()
        assert {(sample.plan, sample.total_batch) for sample in agent.steps[0]} >= {(1, 40), (2, 12)}
    by_rank = lines(tmp_path)
    by_rank[2] += [{**line, "ids": [], "weight": 0.0} for line in by_rank[0][18:]]
    check_equals_one_process(by_rank)
    assert [by_rank[0][step]["factor"] for step in (10, 11, 17, 18, 23, 24)] == [1.0, 1.5, 1.5, 1.75, 1.75, 1.0]


def test_a_stream_is_cut_by_the_plan_and_goes_on_where_it_stood(tmp_path: Path, start: Start) -> None:
    """1. Three ranks read a stream that draws its order itself; each trains its part, of other sizes from step 11 on.
    2. Asked to stop at an epoch's end, they save where the stream stands. 3. Two ranks go on from there: of what was
    trained they read the last batch alone. 4. All of it equals one process, each sample once in each epoch."""
    arguments = (str(tmp_path), "--epochs", str(EPOCHS), "--stream")
    with FakeAgent(tmp_path, run=1, world_size=3, start=start) as agent:
        agent.shares, agent.later_plans = FIRST, [agent.plan(2, 11, SECOND, total_batch=30)]
        agent.start_workers("regression.py", *arguments, "--await-stop-at", "17")
        agent.send_stop_in(17, rank=0)
        assert agent.exit_codes() == [85, 85, 85], agent.said()
        assert (agent.checkpoint_step, agent.prepared.samples) == (18, 0)
    with FakeAgent(tmp_path, run=2, world_size=2, start=start) as agent:
        agent.start_workers("regression.py", *arguments)
        assert agent.exit_codes() == [0, 0], agent.said()
    by_rank = lines(tmp_path)
    by_rank[2] += [{**line, "ids": [], "weight": 0.0} for line in by_rank[0][18:]]
    check_equals_one_process(by_rank)
    orders = [
        [i for parts in zip(*by_rank, strict=True) for p in parts if p["epoch"] == e for i in p["ids"]] for e in (1, 4)
    ]
    assert orders[0] != orders[1]
    assert all(300 < int((tmp_path / f"read-2-{rank}").read_text()) < 330 for rank in (0, 1))


def test_a_plan_waits_for_every_rank_and_a_stuck_worker_saves_and_leaves(tmp_path: Path, start: Start) -> None:
    """1. Rank 0 alone has plan 2: the old one stays in force. 2. Rank 1 gets it too: both change at the same step.
    3. Rank 1 is paused (SIGSTOP), so rank 0 waits in a collective. 4. Asked to stop, rank 0 cannot reach its boundary:
    its link thread saves the last complete step and ends it with 75 well within the grace. 5. Run 2 goes on from there;
    rank 1, on another machine by now, gets the checkpoint from rank 0 and keeps it."""
    out = folder(tmp_path, "run")
    with FakeAgent(out, world_size=2, start=start) as agent:
        agent.speed = 0.8
        agent.own_directories = True
        agent.spec.checkpoint.every_steps = 4
        agent.start_workers("regression.py", str(out), "--epochs", "1000", "--sleep-s", "0.01")
        agent.wait_for_step(1)
        agent.send_plan(2, 0, (3.0, 1.0), 0)
        agent.wait_for_step(agent.alive[0][0] + 20)
        assert [agent.alive[rank][1] for rank in range(2)] == [1, 1]
        agent.send_plan(2, 0, (3.0, 1.0), 1)
        agent.wait_until(lambda: [agent.alive[rank][1] for rank in range(2)] == [2, 2])
        agent.wait_until(lambda: all(agent.steps[rank][-1].plan == 2 for rank in range(2)))
        first_of = [next(sample.step for sample in agent.steps[rank] if sample.plan == 2) for rank in range(2)]
        assert first_of[0] == first_of[1]
        batches = {(sample.plan, sample.local_batch) for sample in agent.steps[0] if sample.total_batch == 12}
        assert batches == {(1, 6), (2, 9)}

        agent.wait_until(lambda: bool(listing.newest(agent.directory_of(1))))
        agent.workers[1].send_signal(signal.SIGSTOP)
        begun_s = time.monotonic()
        agent.send_stop(0, grace_s=16.0)
        assert agent.workers[0].wait(timeout=60) == 75, agent.said()
        assert 7.0 < time.monotonic() - begun_s < 16.0
        reached = len(lines(out, 2)[0])
        assert "is stuck; checkpoint" in agent.said()
        newest = listing.newest(agent.directory_of(0))[0]
        assert newest.step in (reached, reached - 1)  # the line of the step that broke may be written already
        # It may have been paused between the writing of one and the removal of the oldest.
        assert 1 <= len(listing.newest(agent.directory_of(1))) <= agent.spec.checkpoint.keep + 1
        shutil.rmtree(agent.directory_of(1))

    with FakeAgent(out, run=2, world_size=2, start=start) as agent:
        agent.own_directories = True
        epochs = newest.header.epoch + 2  # one more: the first run may have been stuck at an epoch's very end
        agent.start_workers("regression.py", str(out), "--epochs", str(epochs))
        assert agent.exit_codes() == [0, 0], agent.said()
        assert agent.said().count(f"resumes from step {newest.step}\n") == 2
        kept = [(found.run, found.step) for found in listing.newest(agent.directory_of(1))]
        assert (1, newest.step) in kept
        assert kept[0] == (2, 9 * epochs)


def test_a_worker_that_leaves_early_takes_nobody_hostage(tmp_path: Path, start: Start) -> None:
    """Under torchrun's variables alone. Rank 1 calls sys.exit(3) in step 5; rank 0 saves that step and ends with 75.
    Started again, both go on to the end."""
    arguments = (str(tmp_path), "--epochs", "1", "--checkpoints", str(tmp_path / "checkpoints"))
    assert torchrun_like("regression.py", *arguments, "--leave-at", "5", start=start) == [75, 3]
    assert [found.step for found in listing.newest(tmp_path / "checkpoints")] == [5]
    assert torchrun_like("regression.py", *arguments, start=start) == [0, 0]
    assert [found.step for found in listing.newest(tmp_path / "checkpoints")] == [9, 5]
    assert [[line["step"] for line in part] for part in lines(tmp_path, 2)] == [list(range(9))] * 2


def test_half_of_a_step_is_never_saved_as_a_whole_one(tmp_path: Path, start: Start) -> None:
    """A script updates twice per batch. Rank 1 leaves between the two in step 4: rank 0's parameters are those of no
    boundary any more, so it ends with 75 and the checkpoint of step 3 stays the newest. Before that each rank forked a
    child that ended through its exit handlers, and the run went on."""
    assert torchrun_like("two_updates.py", str(tmp_path), "4", start=start) == [75, 3]
    assert [found.step for found in listing.newest(tmp_path)] == [3]


def test_loaders_that_look_ahead_differently_far_change_shares_at_the_same_step(tmp_path: Path, start: Start) -> None:
    """num_workers = os.cpu_count() on unequal machines: a plan comes into force after the longest look-ahead."""
    assert torchrun_like("two_updates.py", str(tmp_path), "-1", start=start) == [0, 0]
