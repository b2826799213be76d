"""Runs of the scripts that train by one strategy and write down their weights: SCRIPTS/NAME_train.py."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from zmq_agent import FakeAgent, Start

from atoll.strategies.declaration import as_json

Tensors = dict[str, torch.Tensor]


def agent_of(strategy: str, out: Path, world_size: int, *, start: Start, run: int = 1, **settings: Any) -> FakeAgent:
    """An agent whose job is one of this strategy."""
    agent = FakeAgent(out, run=run, world_size=world_size, start=start)
    agent.spec.strategy, agent.spec.strategy_settings = strategy, as_json(settings)
    return agent


def ended(out: Path, run: int, world_size: int) -> Tensors:
    """The weights that all ranks ended with, which are the same on all."""
    kept: list[Tensors] = [
        torch.load(out / f"run-{run}-rank-{rank}.end", weights_only=True) for rank in range(world_size)
    ]
    for weights in kept:
        for name, one in weights.items():
            assert torch.equal(one, kept[0][name]), name
    return kept[0]


def undisturbed(
    strategy: str, out: Path, start: Start, *arguments: str, world_size: int = 2, **settings: Any
) -> Tensors:
    out.mkdir()
    with agent_of(strategy, out, world_size, start=start, **settings) as agent:
        agent.start_workers(f"{strategy}_train.py", str(out), *arguments)
        assert agent.exit_codes() == [0] * world_size, agent.said()
    return ended(out, 1, world_size)
