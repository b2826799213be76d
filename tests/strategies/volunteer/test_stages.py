"""Stages of strategy volunteer without volunteers: real worker processes that hold a model together."""

from __future__ import annotations

import json
import signal
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from zmq_agent import FakeAgent, Start

from atoll.errors import exit_codes
from atoll.strategies.declaration import as_json

pytestmark = pytest.mark.timeout(300)


def ranks(out: Path, world_size: int, stages: int, *, start: Start, run: int = 1, every_steps: int = 0) -> FakeAgent:
    out.mkdir(exist_ok=True)
    agent = FakeAgent(out, run=run, world_size=world_size, start=start)
    agent.spec.strategy, agent.spec.strategy_settings = "volunteer", as_json({"stages": stages})
    agent.spec.checkpoint.every_steps = every_steps
    agent.place([f"n{rank}" for rank in range(world_size)], ["i"] * world_size)
    return agent


def trained(
    out: Path, world_size: int, stages: int, *arguments: str, start: Start, run: int = 1, every_steps: int = 0
) -> Path:
    """A job of so many workers, which ends well."""
    with ranks(out, world_size, stages, start=start, run=run, every_steps=every_steps) as agent:
        agent.start_workers("pipeline_train.py", str(out), *arguments)
        assert agent.exit_codes() == [0] * world_size, agent.said()
    return out


def lines(out: Path, rank: int = 0, run: int = 1) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (out / f"run-{run}-rank-{rank}.jsonl").read_text().splitlines()]


def losses(out: Path, rank: int = 0, run: int = 1) -> list[float]:
    return [line["loss"] for line in lines(out, rank, run)]


def whole(out: Path, stages: int, pipeline: int = 0) -> dict[str, torch.Tensor]:
    """The model that a pipeline ended with."""
    holders = range(pipeline * stages, (pipeline + 1) * stages)
    parts = [torch.load(out / f"run-1-rank-{rank}.end", weights_only=True) for rank in holders]
    return {name: one for part in parts for name, one in part.items()}


@pytest.mark.parametrize(
    "arguments",
    [["--optimizer=sgd", "--model=real", "--augment", "--batch=12"], ["--model=list", "--clip=0.5", "--recompute"]],
)
def test_pipelines_of_stages_train_what_one_process_trains(start: Start, tmp_path: Path, arguments: list[str]) -> None:
    """Two stages, and two pipelines of two, each with a part of every batch: losses and weights of one process; with
    samples that are augmented at random, and clipped over stages and pipelines."""
    alone = trained(tmp_path / "alone", 1, 1, *arguments, "--epochs=1", start=start)
    assert losses(alone)[-1] < losses(alone)[0]
    for count in (2, 4):
        out = trained(tmp_path / str(count), count, 2, *arguments, "--epochs=1", start=start)
        assert losses(out) == losses(out, rank=count - 1) == pytest.approx(losses(alone), rel=1e-5, abs=1e-5)
        for pipeline in range(count // 2):
            found = whole(out, 2, pipeline)
            for name, weights in whole(alone, 1).items():
                torch.testing.assert_close(found[name], weights, rtol=1e-5, atol=1e-5)


def test_stages_under_autocast_train_what_one_process_trains(start: Start, tmp_path: Path) -> None:
    """Activations travel in bfloat16, whose shapes and types the stages learned in float32 before the first step."""
    alone = trained(tmp_path / "alone", 1, 1, "--bfloat16", "--epochs=1", start=start)
    out = trained(tmp_path / "stages", 2, 2, "--bfloat16", "--recompute", "--epochs=1", start=start)
    assert losses(out) == losses(out, rank=1) == pytest.approx(losses(alone), rel=1e-3)
    assert losses(alone)[-1] < losses(alone)[0]


def test_a_checkpoint_of_stages_is_one_model_for_any_number_of_them(start: Start, tmp_path: Path) -> None:
    """1. Two stages train an epoch. 2. One process goes on for another epoch, 3. then three stages. The losses are
    those of one process that trained all along."""
    alone = trained(tmp_path / "alone", 1, 1, "--epochs=3", start=start)
    out = tmp_path / "stages"
    for run, stages in enumerate([2, 1, 3], start=1):
        trained(out, stages, stages, f"--epochs={run}", start=start, run=run, every_steps=4)
    shown_again = 1  # the last step of the epoch before
    found = [*losses(out), *(loss for run in (2, 3) for loss in losses(out, run=run)[shown_again:])]
    assert found == pytest.approx(losses(alone), rel=1e-5, abs=1e-5)


@pytest.mark.parametrize(("stages", "lost", "left"), [(1, 1, [0, 2]), (2, 1, [2, 3])])
def test_a_rank_that_is_killed_in_a_step_takes_along_what_it_had_of_it_and_others_make_it_whole_in_place(
    start: Start, tmp_path: Path, stages: int, lost: int, left: list[int]
) -> None:
    """1. Three ranks with the whole model, or two pipelines of two stages; one rank gets SIGKILL in step 3 when it has
    two samples of it. 2. Those who can go on do so in view 2, in their processes; whose pipeline is not whole leaves.
    3. With whole models what counted on those who are left counts on: of step 3 they fetch each sample once, in both
    views together. With stages they make all of it again. 4. Losses and weights are those of one process, so each
    sample counted once."""
    arguments = ("--batch=12", "--optimizer=sgd", "--epochs=1", "--model=real")
    alone = trained(tmp_path / "alone", 1, 1, *arguments, start=start)
    world_size = {1: 3, 2: 4}[stages]
    out = tmp_path / "out"
    agent = ranks(out, world_size, stages, start=start)
    with agent:
        agent.makes_views = True
        agent.start_workers("pipeline_train.py", str(out), f"--die={lost}:3:2", *arguments)
        assert agent.workers[lost].wait(timeout=120) == -signal.SIGKILL, agent.said()
        told = [rank for rank in range(world_size) if rank != lost]
        agent.send_view(2, left, [1.0] * len(left), plan_id=2, to=told)
        agent.put_in_force()
        codes = [0 if rank in left else exit_codes.DRAINED for rank in range(world_size)]
        codes[lost] = -signal.SIGKILL
        assert agent.exit_codes() == codes, agent.said()
    for rank in left:
        whole_ones = [line["loss"] for line in lines(out, rank) if line["loss"]]  # 0: of the step that broke off
        assert whole_ones == pytest.approx(losses(alone), rel=1e-5, abs=1e-5)
    step = [line for rank in left[::stages] for line in lines(out, rank) if line["round"] == 3]
    assert {line["view"] for line in step} == {1, 2}
    counting = [line for line in step if stages == 1 or line["view"] == 2]
    fetched = Counter(number for line in counting for number in line["samples"])
    assert fetched == dict.fromkeys(next(line["samples"] for line in lines(alone) if line["round"] == 3), 1)
    found = whole(out, stages, pipeline=left[0] // stages)
    for name, weights in whole(alone, 1).items():
        torch.testing.assert_close(found[name], weights, rtol=1e-5, atol=1e-5)
