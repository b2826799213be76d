"""Steps whose parts take a known time at least: 10 ms to load, 20 forward, 30 backward, 10 to update, all by sleeping.

The last two epochs train in ways that cannot be cut up: loss.backward(), then an update for every second batch."""

from __future__ import annotations

import time

import torch
from torch import nn

import atoll

BATCHES = 4  # an epoch


class Slow(torch.utils.data.Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return 4 * BATCHES

    def __getitem__(self, index: int) -> torch.Tensor:
        time.sleep(0.005)
        return torch.full((4,), float(index))


class SleepBackward(torch.autograd.Function):
    @staticmethod
    def forward(context: torch.autograd.function.FunctionCtx, x: torch.Tensor, seconds: float) -> torch.Tensor:
        context.seconds = seconds
        return x.clone()

    @staticmethod
    def backward(context: torch.autograd.function.FunctionCtx, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        time.sleep(context.seconds)
        return gradient, None


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.last = nn.Linear(4, 300_000)  # its gradient fills the first bucket

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        time.sleep(0.02)
        y = SleepBackward.apply(self.first(x), 0.02)  # by then the first bucket left
        return SleepBackward.apply(self.last(y).mean(), 0.01)


run = atoll.init(seed=1)
model = Model()
optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
optimizer.register_step_pre_hook(lambda *_: time.sleep(0.01))
model, optimizer, loader = run.prepare(model, optimizer, Slow(), batch_size=4)
for epoch in run.epochs(5):
    for number, x in enumerate(loader):
        loss = model(x)
        if epoch == 3:
            loss.backward()
        else:
            run.backward(loss)
        if epoch < 4 or number % 2:
            optimizer.step()
            optimizer.zero_grad()
