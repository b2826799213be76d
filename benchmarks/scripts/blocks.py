"""One run that trains blocks of steps with something and without it, in turn: a machine that is slower for a while is
slower for both."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch

import atoll

BLOCK = 20


def train_in_blocks(
    run: atoll.Run,
    optimizer: torch.optim.Optimizer,
    loader: Any,
    loss: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
    *,
    blocks: int,
    turn: Callable[[int], None],
    left_out: int = 1,
    counted: Callable[[], None] = lambda: None,
) -> list[list[float]]:
    """Seconds of each step, by block. turn: called in each block's first step, with its number. left_out: steps at a
    block's beginning that do not count, for they are neither one nor the other. counted: called after every other."""
    took: list[list[float]] = []
    before, last = 0.0, BLOCK * blocks - 1
    for _ in run.epochs(1_000_000):
        for inputs, labels in loader:
            block, place = divmod(run.step, BLOCK)
            if place == 0:
                turn(block)
                took.append([])
            run.backward(loss(inputs, labels))
            optimizer.step()
            optimizer.zero_grad()
            now = time.perf_counter()
            if place >= left_out:
                took[-1].append(now - before)
                counted()
            before = now
            if run.step == last:
                return took
    return took
