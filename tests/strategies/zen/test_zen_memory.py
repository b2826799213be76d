"""Runs of strategy zen that lose all machines at once and go on from memory, also with another number of workers."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from strategy_runs import Tensors, agent_of, ended
from zmq_agent import FakeAgent, Start

pytestmark = pytest.mark.timeout(300)

Calm = Callable[..., Tensors]


def remembering(out: Path, start: Start, run: int, world_size: int) -> FakeAgent:
    """Each rank on a node of its own, in one island; the disk gets nothing before the job's end."""
    agent = agent_of("zen", out, world_size, start=start, run=run, scheme="zen")
    agent.own_directories, agent.memory = True, out / "memory"
    agent.spec.checkpoint.memory_replicas, agent.spec.checkpoint.every_steps = 1, 0
    agent.place([f"node-{rank}" for rank in range(world_size)], ["one"] * world_size)
    return agent


def goes_on_after_power_loss(out: Path, start: Start, after: int) -> tuple[int, Tensors]:
    """A run of two is killed; the next one, of `after` ranks, ends. Returns its first step, and its weights."""
    out.mkdir()
    with remembering(out, start, 1, 2) as agent:
        agent.start_workers("zen_train.py", str(out), "--hold-at", "7")
        agent.lose_power(5)
    with remembering(out, start, 2, after) as agent:
        agent.start_workers("zen_train.py", str(out))
        assert agent.exit_codes() == [0] * after, agent.said()
    logs = [(out / "job" / f"run-2-rank-{rank}.log").read_text() for rank in range(after)]
    found = [re.search(r"resumes from step (\d+), from memory", log) for log in logs]
    steps = {int(one[1]) for one in found if one is not None}
    assert all(found), logs
    assert len(steps) == 1
    return steps.pop(), ended(out, 2, after)


def samples_of(out: Path, run: int, steps: range) -> Counter[tuple[int, int]]:
    """Of these steps alone: who goes on at an epoch's very end shows its last batch once more, which does not count."""
    trained: Counter[tuple[int, int]] = Counter()
    for path in out.glob(f"run-{run}-rank-*.jsonl"):
        for line in map(json.loads, path.read_text().splitlines()):
            if line["step"] in steps:
                trained.update((line["step"] // 8, sample) for sample in line["samples"])
    return trained


def test_all_machines_lose_power_and_the_job_goes_on_from_memory(start: Start, tmp_path: Path, calm: Calm) -> None:
    """1. Both ranks are killed; nothing is on disk. 2. The next run goes on from the step that was in memory, with
    SparseAdam's moments: its weights have the bits of a run that nobody disturbed."""
    expected = calm()
    step, weights = goes_on_after_power_loss(tmp_path / "lost", start, after=2)
    assert step >= 5
    assert all(torch.equal(weights[name], expected[name]) for name in expected)


def test_a_run_of_three_goes_on_from_the_memory_of_two(start: Start, tmp_path: Path, calm: Calm) -> None:
    """As above with one rank more: partitions by hashing are three now. Every sample counts once, and the weights are
    those of the undisturbed run but for the order of sums."""
    out = tmp_path / "lost"
    step, weights = goes_on_after_power_loss(out, start, after=3)
    trained = samples_of(out, 1, range(step)) + samples_of(out, 2, range(step, 10**6))
    assert trained == Counter((epoch, sample) for epoch in range(2) for sample in range(96))
    torch.testing.assert_close(weights, calm(), rtol=1e-4, atol=1e-5)


def test_a_run_of_one_goes_on_from_a_checkpoint_of_three(start: Start, tmp_path: Path, calm: Calm) -> None:
    """1. Rank 2 of three is killed in a push of step 5; the others save the step before. 2. One worker alone goes on,
    with nobody to send to, and ends with the weights of the undisturbed run but for the order of sums."""
    with agent_of("zen", tmp_path, 3, start=start, scheme="zen") as agent:
        agent.start_workers("zen_train.py", str(tmp_path), "--fault", "5:2:die")
        assert sorted(agent.exit_codes()) == [-9, 75, 75], agent.said()
    with agent_of("zen", tmp_path, 1, start=start, run=2, scheme="zen") as agent:
        agent.start_workers("zen_train.py", str(tmp_path))
        assert agent.exit_codes() == [0], agent.said()
        assert "resumes from step 5\n" in agent.said()
    torch.testing.assert_close(ended(tmp_path, 2, 1), calm(world_size=3), rtol=1e-4, atol=1e-5)
