"""Runs of stale_train.py: how they are started, what they wrote down, and what must be conserved."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from strategy_runs import Tensors, agent_of
from zmq_agent import FakeAgent, Start

LR = 0.01  # of stale_train.py


def sparse(
    out: Path, world_size: int, *, start: Start, run: int = 1, strategy: str = "stale-sparse", **settings: Any
) -> FakeAgent:
    """An agent whose job is one of this strategy."""
    return agent_of(strategy, out, world_size, start=start, run=run, **settings)


def kept(out: Path, run: int, rank: int, what: str) -> dict[str, Any]:
    """What stale_train.py wrote down at the beginning or end of a run."""
    state: dict[str, Any] = torch.load(out / f"run-{run}-rank-{rank}.{what}", weights_only=True)
    return state


def together(states: Iterable[dict[str, Any]], what: str) -> Tensors:
    """The sum over ranks, in float64."""
    sums: Tensors = {}
    for state in states:
        for name, tensor in state[what].items():
            sums[name] = sums.get(name, torch.zeros_like(tensor, dtype=torch.float64)) + tensor.double()
    return sums


def left(states: Sequence[dict[str, Any]]) -> Tensors:
    """What shared parameters lack: residuals and aggregators' sums, over all ranks."""
    residuals, sums = together(states, "residuals"), together(states, "aggregator_sums")
    return {name: one + sums.get(name, torch.zeros_like(one)) for name, one in residuals.items()}


def check_alike(states: Sequence[dict[str, Any]], what: str) -> Tensors:
    """All ranks have the same bits. Returns them."""
    first: Tensors = states[0][what]
    for rank, state in enumerate(states):
        for name, tensor in state[what].items():
            assert torch.equal(tensor.view(torch.uint8), first[name].view(torch.uint8)), (rank, name)
    return first


def equal(ones: Tensors, others: Tensors) -> bool:
    return all(torch.equal(ones[name], others[name]) for name in ones)


def check_nothing_was_lost(
    begun: Tensors, shared_params: Tensors, gradients: Tensors, residuals: Tensors, exchange: str
) -> None:
    """Plain SGD: the shared parameters' way and residuals are, over the rate, all gradients there ever were."""
    for name in shared_params:
        way = (begun[name].double() - shared_params[name].double()) / LR
        residual = residuals[name] / (LR if exchange == "updates" else 1.0)
        torch.testing.assert_close(
            way + residual, gradients[name], rtol=1e-4, atol=1e-3, msg=lambda text, name=name: f"{name}: {text}"
        )


def lines(out: Path) -> list[dict[str, Any]]:
    """What all ranks wrote of each step, in the order of each."""
    found = []
    for log in sorted(out.glob("run-*-rank-*.jsonl")):
        of = {"run": int(log.name.split("-")[1]), "rank": int(log.name.split("-")[3].partition(".")[0])}
        found += [json.loads(text) | of for text in log.read_text().splitlines()]
    return found


def trained(out: Path) -> list[dict[str, Any]]:
    """One entry per rank and step, of the newest run that trained it, and there of the newest view."""
    newest: dict[int, tuple[int, int]] = {}
    for line in lines(out):
        newest[line["step"]] = max(newest.get(line["step"], (0, 0)), (line["run"], line["view"]))
    return [line for line in lines(out) if newest[line["step"]] == (line["run"], line["view"])]


def sent_in_a_round(agent: FakeAgent, epoch_steps: int) -> list[list[float]]:
    """Bytes that each rank put on its links in a sync round: a list for each epoch, which must all be as long.

    The last round of an epoch mostly leaves while the epoch's end is synchronized, and no step has its bytes then: one
    round of `epoch_steps - 1` is the error of this."""
    by_epoch = []
    for begin in range(0, len(agent.steps[0]), epoch_steps):
        steps = [agent.steps[rank][begin : begin + epoch_steps] for rank in range(agent.world_size)]
        sent = [sum(one.strategy_metrics["sent_bytes"] for one in of_rank) for of_rank in steps]
        by_epoch.append([each / (epoch_steps - 1) for each in sent])
    return by_epoch


def check_every_sample_once(out: Path, epochs: int) -> None:
    for epoch in range(epochs):
        ids = Counter(sample for line in trained(out) if line["epoch"] == epoch for sample in line["ids"])
        assert ids == Counter(range(100)), f"epoch {epoch}: not each sample exactly once"
