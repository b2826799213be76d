"""Trains with loader's workers on what it defines itself, without a main guard. Says what came of it as JSON."""

from __future__ import annotations

import json
import multiprocessing
from typing import Any

import torch
from torch import nn
from torch.utils.data import Dataset, get_worker_info

import atoll

assert multiprocessing.parent_process() is None, "a loader's worker imported the script"
SCALE = 2.0


class Mine(Dataset[Any]):
    def __init__(self) -> None:
        self.rows = torch.arange(40.0).reshape(40, 1)

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> Any:
        worker = get_worker_info()
        assert worker is not None
        return self.rows[index] * SCALE, worker.id, self.rows.is_shared()


run = atoll.init()
model = nn.Linear(1, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
model, optimizer, loader = run.prepare(
    model, optimizer, Mine(), batch_size=10, num_workers=2, collate_fn=lambda rows: list(zip(*rows, strict=True))
)
seen: dict[str, set[Any]] = {"rows": set(), "workers": set(), "shared": set()}
for _ in run.epochs(1):
    for rows, workers, shared in loader:
        seen["rows"] |= {row.item() for row in rows}
        seen["workers"] |= set(workers)
        seen["shared"] |= set(shared)
        run.backward(model(torch.stack(rows)).mean())
        optimizer.step()
        optimizer.zero_grad()
print(json.dumps({name: sorted(found) for name, found in seen.items()}))
