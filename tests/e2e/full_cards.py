"""Checks of jobs that ran scripts/full_card.py: what was trained, and on how many samples at once."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from cluster import trained_samples
from torch import nn

BATCH = 256


def plain_weights(out: Path, steps: int, *, scheduled: bool) -> torch.Tensor:
    """Train the recorded steps on whole batches in one process, without Atoll."""
    generator = torch.Generator().manual_seed(3)
    inputs = torch.randn(BATCH * steps, 8, generator=generator)
    targets = inputs @ torch.randn(8, 1, generator=generator)
    torch.manual_seed(5)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.98)
    trained = trained_samples(out)[0]
    assert sorted(i for ids in trained.values() for i in ids) == list(range(BATCH * steps))
    for step in sorted(trained):
        assert len(trained[step]) == BATCH
        optimizer.zero_grad()
        nn.functional.mse_loss(model(inputs[trained[step]]), targets[trained[step]]).backward()
        optimizer.step()
        if scheduled:
            scheduler.step()
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def assert_like_plain(out: Path, steps: int = 60, *, scheduled: bool = False) -> None:
    final = json.loads((out / "final.json").read_text())
    assert final["steps"] == steps
    torch.testing.assert_close(
        torch.tensor(final["weights"]), plain_weights(out, steps, scheduled=scheduled), rtol=1e-4, atol=1e-5
    )


def largest_batches(out: Path) -> dict[int, list[int]]:
    """Return each rank's batch sizes in the order of its passes, over all runs."""
    found: dict[int, list[int]] = {}
    for path in sorted(out.glob("run-*-rank-*.jsonl"), key=lambda path: int(path.name.split("-")[1])):
        sizes = [len(json.loads(line)["ids"]) for line in path.read_text().splitlines()]
        found.setdefault(int(path.stem.split("-")[3]), []).extend(sizes)
    return found


def assert_no_size_overflows_twice(out: Path, holds: int) -> None:
    for sizes in largest_batches(out).values():
        too_large = [size for size in sizes if size > holds]
        assert len(set(too_large)) == len(too_large), too_large
