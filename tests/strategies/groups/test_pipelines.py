"""Pipelines of strategy groups: real worker processes that hold a model together. Each test is a story."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from scheduled_runs import Scheduling, groups, rounds
from zmq_agent import Start

from atoll.strategies.groups.settings import Groups

pytestmark = pytest.mark.timeout(120)


def trained(
    out: Path, world_size: int, stages: int, *arguments: str, start: Start, run: int = 1, every_steps: int = 0
) -> Path:
    """A job of so many workers, which ends well."""
    out.mkdir(exist_ok=True)
    settings = {"stages": stages, "grouping": "all"}
    agent = groups(out, world_size, start=start, run=run, **settings)
    agent.spec.checkpoint.every_steps = every_steps
    with agent, Scheduling(agent, Groups(**settings)):  # type: ignore[arg-type]
        agent.start_workers("pipeline_train.py", str(out), *arguments)
        assert agent.exit_codes() == [0] * world_size, agent.said()
    return out


def losses(out: Path, rank: int = 0, run: int = 1) -> list[float]:
    return [line["loss"] for line in rounds(out, rank, run)]


def whole(out: Path, stages: int, run: int = 1) -> dict[str, torch.Tensor]:
    """The model that the first pipeline ended with."""
    parts = [torch.load(out / f"run-{run}-rank-{rank}.end", weights_only=True) for rank in range(stages)]
    return {name: one for part in parts for name, one in part.items()}


@pytest.mark.parametrize(
    "arguments",
    [
        ["--optimizer=sgd", "--model=real"],
        ["--model=list", "--clip=0.5", "--recompute"],
        ["--bfloat16", "--split-at", "3"],
    ],
)
def test_two_stages_train_what_one_process_trains(start: Start, tmp_path: Path, arguments: list[str]) -> None:
    """Layers of one model on two workers, each of which made only its own: losses and weights of one process; with
    momentum or Adam, clipped over both stages, with activations computed twice, or sent in bfloat16."""
    alone = trained(tmp_path / "alone", 1, 1, *arguments, start=start)
    together = trained(tmp_path / "together", 2, 2, *arguments, start=start)
    assert losses(together) == losses(together, rank=1) == pytest.approx(losses(alone), rel=1e-5, abs=1e-5)
    assert losses(alone)[-1] < losses(alone)[0]
    expected, found = whole(alone, 1), whole(together, 2)
    assert list(found) == list(expected)
    for name, weights in expected.items():
        torch.testing.assert_close(found[name], weights, rtol=1e-5, atol=1e-5)
