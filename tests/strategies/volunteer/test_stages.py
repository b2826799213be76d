"""Stages of strategy volunteer without volunteers: real worker processes that hold a model together."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from zmq_agent import FakeAgent, Start

from atoll.strategies.declaration import as_json

pytestmark = pytest.mark.timeout(120)


def trained(
    out: Path, world_size: int, stages: int, *arguments: str, start: Start, run: int = 1, every_steps: int = 0
) -> Path:
    """A job of so many workers, which ends well."""
    out.mkdir(exist_ok=True)
    agent = FakeAgent(out, run=run, world_size=world_size, start=start)
    agent.spec.strategy, agent.spec.strategy_settings = "volunteer", as_json({"stages": stages})
    agent.spec.checkpoint.every_steps = every_steps
    agent.place([f"n{rank}" for rank in range(world_size)], ["i"] * world_size)
    with agent:
        agent.start_workers("pipeline_train.py", str(out), *arguments)
        assert agent.exit_codes(100) == [0] * world_size, agent.said()
    return out


def losses(out: Path, rank: int = 0, run: int = 1) -> list[float]:
    lines = [json.loads(line) for line in (out / f"run-{run}-rank-{rank}.jsonl").read_text().splitlines()]
    return [line["loss"] for line in lines]


def whole(out: Path, stages: int, pipeline: int = 0) -> dict[str, torch.Tensor]:
    """The model that a pipeline ended with."""
    ranks = range(pipeline * stages, (pipeline + 1) * stages)
    parts = [torch.load(out / f"run-1-rank-{rank}.end", weights_only=True) for rank in ranks]
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
    for ranks in (2, 4):
        out = trained(tmp_path / str(ranks), ranks, 2, *arguments, "--epochs=1", start=start)
        assert losses(out) == losses(out, rank=ranks - 1) == pytest.approx(losses(alone), rel=1e-5, abs=1e-5)
        for pipeline in range(ranks // 2):
            found = whole(out, 2, pipeline)
            for name, weights in whole(alone, 1).items():
                torch.testing.assert_close(found[name], weights, rtol=1e-5, atol=1e-5)


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
