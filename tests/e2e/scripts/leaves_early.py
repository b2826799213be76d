"""Rank 1 returns from the middle of training with exit code 0; the others have steps to go."""

import sys

import torch

import atoll

run = atoll.init()
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
dataset = torch.utils.data.TensorDataset(torch.randn(64, 4), torch.randn(64, 1))
model, optimizer, loader = run.prepare(model, optimizer, dataset, batch_size=8)
for _ in run.epochs(1000):
    for inputs, targets in loader:
        if run.rank == 1 and run.step == 3:
            sys.exit(0)
        run.backward(torch.nn.functional.mse_loss(model(inputs), targets))
        optimizer.step()
        optimizer.zero_grad()
