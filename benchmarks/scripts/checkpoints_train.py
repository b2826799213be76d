"""Submitted by benchmarks/checkpoints.py: trains blocks of steps with checkpoints in memory and without, in turn, and
writes what each step of rank 0 took, and what the tier says of itself.

    checkpoints_train.py OUT BLOCKS WIDTH BATCH [disk]

With "disk" it is the job that has a checkpoint on disk begin with every second block; the script only looks."""

from __future__ import annotations

import json
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from blocks import BLOCK, train_in_blocks
from torch import nn


def size_of_entry(entry: tuple[str, str, list[int]]) -> int:
    from atoll.agent.runtime.checkpoints.memory.shards.live_state import size_of

    return size_of(entry[1], entry[2])


def make(width: int) -> tuple[nn.Module, torch.utils.data.TensorDataset]:
    """width: of four hidden layers; 2048 makes 18 M parameters."""
    torch.manual_seed(0)
    sizes = [256, *[width] * 5]
    layers = [part for a, b in pairwise(sizes) for part in (nn.Linear(a, b), nn.GELU())]
    inputs = torch.randn(16384, 256)
    return nn.Sequential(*layers, nn.Linear(width, 10)), torch.utils.data.TensorDataset(inputs, inputs.argmax(1) % 10)


def main() -> None:
    import atoll

    out, blocks, width, batch = Path(sys.argv[1]), *map(int, sys.argv[2:5])
    disk = sys.argv[5:] == ["disk"]
    run = atoll.init(seed=1)
    model, dataset = make(width)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    model, optimizer, loader = run.prepare(model, optimizer, dataset, batch_size=batch)
    training: Any = run._training
    tier, saver = training.state.memory, training.state.saver
    remember = tier.at_boundary
    writing: list[list[bool]] = []  # whether a checkpoint was on its way to the disk as the step ended

    def turn(block: int) -> None:
        tier.at_boundary = remember if block % 2 == 0 else lambda agreed: None
        writing.append([])

    def loss(inputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(model(inputs), labels)

    def counted() -> None:
        writing[-1].append(saver._under_way is not None and saver._under_way.is_alive())

    took = train_in_blocks(
        run, optimizer, loader, loss, blocks=blocks, turn=turn, left_out=0 if disk else 1, counted=counted
    )
    if run.is_main:
        cadence, sender = tier._cadence, tier._sender
        told = {
            "took": took,
            "writing": writing,
            "parameters": sum(parameter.numel() for parameter in model.parameters()),
            "shared_bytes": 0 if disk else tier._shard.layout.total,
            "own_bytes": sum(map(size_of_entry, (tier._shard.own or {"tensors": []})["tensors"])),
            "every": cadence.every,
            "cost_s": cadence.cost_s,
            "copied_bytes": sender.sent_bytes if sender is not None else 0,
            "steps": BLOCK * blocks,
        }
        out.write_text(json.dumps(told))


if __name__ == "__main__":
    main()
