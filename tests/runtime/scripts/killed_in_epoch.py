"""Prints the numbers of the processes that load its batches, and dies in the middle of an epoch."""

from __future__ import annotations

import os
import signal
from typing import Any

import psutil
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import atoll

run = atoll.init()
model = nn.Linear(1, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
given: DataLoader[Any] = DataLoader(TensorDataset(torch.zeros(80, 1)), batch_size=2, num_workers=2)
model, optimizer, loader = run.prepare(model, optimizer, given)
for _ in run.epochs(1):
    for _batch in loader:
        print("started:", *(child.pid for child in psutil.Process().children(recursive=True)), flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
