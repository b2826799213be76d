"""Two ranks whose data or passes differ, or whose dataset changes its length. Each rank writes what it met.

Arguments: the case, the strategy, the folder for results, the step at which both ranks leave (-1: none)."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import Dataset, IterableDataset

import atoll

LENGTHS = (8, 14, 5)  # of the epochs where the dataset changes


class Rows(Dataset[torch.Tensor]):
    def __init__(self, samples: int) -> None:
        self.samples = samples

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((1,), float(range(self.samples)[index]))


class Stream(IterableDataset[torch.Tensor]):
    def __init__(self, samples: int) -> None:
        self.samples = samples

    def __iter__(self) -> Iterator[torch.Tensor]:
        return (torch.full((1,), float(index)) for index in range(self.samples))


def train(case: str, run: atoll.Run, leave_at: int) -> list[list[int]]:
    """Train, and return step, epoch and rows of each batch."""
    longer = 8 * run.rank
    data: Any = Stream(20 + longer) if case == "stream" else Rows(LENGTHS[0] if case == "grow" else 20)
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    model, optimizer, loader = run.prepare(model, optimizer, data, batch_size=4)
    seen: list[list[int]] = []
    for epoch in run.epochs(len(LENGTHS) if case == "grow" else 2):
        if case == "grow":
            data.samples = LENGTHS[epoch]
        elif case == "length":
            data.samples = 20 + epoch * longer
        for batch in loader:
            if run.step == leave_at:
                return seen
            apart = run.rank == 1 and run.step == 2
            if case == "skip" and apart:
                continue
            if case == "unreached" and apart:
                nn.Parameter(torch.ones(())).backward()  # type: ignore[no-untyped-call]
            else:
                model(batch).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            counts = loader.current.local if loader.current is not None else 0
            seen.append([run.step, epoch, *(int(row) for row in batch[:counts])])
    return seen


case, strategy, folder, leave_at = sys.argv[1], sys.argv[2], Path(sys.argv[3]), int(sys.argv[4])
saving = {"checkpoint_directory": folder / "checkpoints", "checkpoint_every": 1} if case == "grow" else {}
run = atoll.init(strategy=strategy, **saving)  # type: ignore[arg-type]
found: Any
try:
    found = train(case, run, leave_at)
except atoll.errors.BadInput as error:
    found = str(error)
(folder / f"{case}-{leave_at}-{run.rank}.json").write_text(json.dumps(found))
if leave_at >= 0 or isinstance(found, str):
    os._exit(3)
