"""Trains by a toy local-update method: each rank steps alone, and models are averaged every few updates.

    python averaging.py OUT    (RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT are set)

Writes the weights shown by an evaluation in the middle of training, and those at the end."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from torch import nn

import atoll
from atoll.agent.runtime.strategy_interface.capabilities import LocalUpdate, WorkerContext, WorkerHalf
from atoll.strategies import registry
from atoll.strategies.declaration import Strategy, StrategySettings

EVERY = 3  # updates from one average to the next
SHOWN_AFTER = 4  # updates: one after an average


class Averaging(StrategySettings):
    """None."""


class PeriodicAverage(LocalUpdate):
    """The whole method: a new one needs these members alone."""

    updates = 0

    def after_update(self) -> None:
        self.updates += 1
        if self.updates % EVERY == 0:
            self.flush()

    @torch.no_grad()
    def flush(self) -> None:
        group = self.context.session.group
        assert group is not None
        for parameter in self.context.model.parameters():
            group.sum_in_place(parameter.data, "averaging models")
            parameter.div_(group.world_size)


def build(context: WorkerContext) -> WorkerHalf:
    return WorkerHalf(PeriodicAverage(context))


if __name__ == "__main__":
    toy = Strategy(name="averaging", summary="", settings=Averaging, worker="__main__:build")
    known = registry.of
    registry.of = lambda settings: toy if isinstance(settings, Averaging) else known(settings)
    run = atoll.init(seed=5, strategy=Averaging())
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    inputs = torch.randn(48, 4, generator=torch.Generator().manual_seed(2))
    data = torch.utils.data.TensorDataset(inputs, inputs.sum(1, keepdim=True))
    model, optimizer, loader = run.prepare(model, optimizer, data, batch_size=12, shuffle=False)
    out = Path(sys.argv[1]) / f"rank-{run.rank}.pt"
    kept = {"begin": {name: one.clone() for name, one in model.state_dict().items()}}
    for _ in run.epochs(2):
        for some, wanted in loader:
            run.backward(nn.functional.mse_loss(model(some), wanted))
            optimizer.step()
            optimizer.zero_grad()
            if run.step + 1 == SHOWN_AFTER:
                own = {name: one.clone() for name, one in model.state_dict().items()}
        if run.step == SHOWN_AFTER:
            with run.evaluation():
                kept["shown"] = {name: one.clone() for name, one in model.state_dict().items()}
            kept["own"] = {name: one.clone() for name, one in model.state_dict().items()}
            assert all(torch.equal(kept["own"][name], one) for name, one in own.items())
    kept["end"] = {name: one.clone() for name, one in model.state_dict().items()}
    torch.save(kept, out)
    run.close()
