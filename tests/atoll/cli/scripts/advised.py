"""Small models for `atoll advise`: MODEL is "mlp", "words" (an embedding with sparse gradients) or "pipeline"."""

from __future__ import annotations

import os

import torch
from torch import nn

import atoll

run = atoll.init(seed=7)
generator = torch.Generator().manual_seed(3)
if os.environ["MODEL"] == "words":
    words, targets = torch.randint(0, 4000, (600, 4), generator=generator), torch.randn(600, 8, generator=generator)
    model = nn.Sequential(nn.EmbeddingBag(4000, 8, sparse=True), nn.Linear(8, 8))
    dataset = torch.utils.data.TensorDataset(words, targets)
else:
    inputs, targets = torch.randn(600, 32, generator=generator), torch.randn(600, 8, generator=generator)
    model = nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 8))
    dataset = torch.utils.data.TensorDataset(inputs, targets)

if os.environ["MODEL"] == "pipeline":
    train_round, rounds = run.prepare_pipeline(
        model, lambda parameters: torch.optim.SGD(parameters, lr=0.1), nn.functional.mse_loss, dataset, batch_size=20
    )
    for _ in run.epochs(int(os.environ.get("EPOCHS", "100"))):
        for each in rounds:
            train_round(each)
else:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer, loader = run.prepare(model, optimizer, dataset, batch_size=20)
    for _ in run.epochs(int(os.environ.get("EPOCHS", "100"))):
        for x, y in loader:
            run.backward(nn.functional.mse_loss(model(x), y))
            optimizer.step()
            optimizer.zero_grad()
