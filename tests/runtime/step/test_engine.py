"""A toy Engine: two micro-batches a step, forward and backward by itself; the step loop drives it."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from atoll.agent.runtime.agent_link.place import WorkerPlace
from atoll.agent.runtime.data.loader import LoaderSettings
from atoll.agent.runtime.data.sampler import BatchSlice
from atoll.agent.runtime.session.probe import VARIABLE, Probe
from atoll.agent.runtime.session.session import CheckpointSettings, Session
from atoll.agent.runtime.session.throttle import Throttle
from atoll.agent.runtime.step.training import Training
from atoll.agent.runtime.strategy_interface.capabilities import WorkerContext, WorkerHalf
from atoll.errors import BadInput
from atoll.strategies import registry
from atoll.strategies.declaration import Strategy, StrategySettings
from atoll.strategies.dense.settings import Dense


class Settings(StrategySettings):
    """None."""


class MicroBatches:
    """The loss is the mean over both halves, in one update."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self._model, self._optimizer = model, optimizer
        self.steps: list[BatchSlice] = []
        self.closed = False

    def step(self, batch: Any, taken: BatchSlice) -> torch.Tensor:
        self.steps.append(taken)
        halves = [half for half in batch[0].chunk(2) if len(half)]
        losses = [self._model(half).square().sum() / len(batch[0]) for half in halves]
        for loss in losses:
            loss.backward()  # type: ignore[no-untyped-call]
        self._optimizer.step()
        self._optimizer.zero_grad()
        return torch.stack(losses).sum().detach()

    def start(self) -> None: ...

    why_not_in_place = lost = None
    tolerates_loss_mid_step = False

    def rewind(self, step: int) -> bool:
        return False

    def close(self, *, followed: bool = False) -> None:
        self.closed = True


def build(context: WorkerContext) -> WorkerHalf:
    return WorkerHalf(MicroBatches(context.model, context.optimizers[0]))


def training(strategy: StrategySettings, model: nn.Module, probe: Probe | None = None) -> Training:
    session = Session(
        place=WorkerPlace.from_environment({}),
        device=torch.device("cpu"),
        job="",
        run=0,
        seed=3,
        strategy=strategy,
        checkpoint=CheckpointSettings(directory=None, every_steps=0, keep=2),
        first=None,
        group=None,
        collective_timeout_s=60,
        link=None,
        throttle=Throttle(1.0),
        probe=probe,
    )
    data = torch.utils.data.TensorDataset(torch.arange(44.0).reshape(11, 4) / 44)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    made = Training(session, model, [optimizer], LoaderSettings(dataset=data, batch_size=4), {})
    made.start()
    return made


def test_the_step_loop_drives_an_engine_through_every_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    """1. Boundaries slice batches as ever; each goes to the engine once. 2. Its updates are those of the whole batches.
    3. Closing the training closes it."""
    toy = Strategy(name="toy-engine", summary="", settings=Settings, worker=f"{__name__}:build")
    monkeypatch.setattr(registry, "of", lambda settings: toy)
    torch.manual_seed(1)
    model = nn.Linear(4, 1)
    alone = copy.deepcopy(model)
    with_engine = training(Settings(), model)
    engine: Any = with_engine._current.driver.engine
    batches: list[torch.Tensor] = []
    losses = []
    for epoch in range(2):
        with_engine.begin_epoch(epoch)
        for batch in with_engine.loader:
            batches.append(batch[0])
            losses.append(with_engine.script.step(batch).item())
    with_engine.finish()
    with_engine.close()
    assert [(one.step, one.total) for one in engine.steps] == list(enumerate([4, 4, 3, 4, 4, 3]))
    assert engine.closed
    optimizer = torch.optim.SGD(alone.parameters(), lr=0.1)
    for batch, loss in zip(batches, losses, strict=True):
        optimizer.zero_grad()
        expected = alone(batch).square().mean()
        expected.backward()
        optimizer.step()
        assert loss == pytest.approx(expected.item(), rel=1e-5)
    torch.testing.assert_close(model.weight, alone.weight)


def test_a_strategy_without_an_engine_leaves_the_step_to_the_script() -> None:
    made = training(Dense(), nn.Linear(4, 1))
    made.begin_epoch(0)
    (batch, *_) = made.loader
    with pytest.raises(BadInput, match="no engine of its own"):
        made.script.step(batch)
    made.close()


def test_a_trial_trains_with_the_learning_rate_that_it_is_given(tmp_path: Path) -> None:
    """1. A trial is asked for with twice the script's learning rate. 2. Its update is twice as far; after it the
    optimizer has its own again."""
    asked = {"directory": str(tmp_path), "steps": 3, "batch": 4, "learning_rate_factor": 2.0}
    moved = []
    for probe in (None, Probe.from_environment(0, {VARIABLE: json.dumps(asked)})):
        torch.manual_seed(1)
        model = nn.Linear(4, 1)
        made = training(Dense(), model, probe)
        made.begin_epoch(0)
        before = model.weight.detach().clone()
        (inputs,) = next(iter(made.loader))
        model(inputs).square().mean().backward()
        (optimizer,) = made._optimizers
        optimizer.step()
        moved.append(model.weight.detach() - before)
        assert optimizer.param_groups[0]["lr"] == 0.1
        made.close()
    torch.testing.assert_close(moved[1], 2 * moved[0])
