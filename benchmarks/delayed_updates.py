"""Trains with updates that are applied one step later (delayed parameter updates), for what they cost in loss.

    python benchmarks/delayed_updates.py [--seeds 1 2 3 4 5] [--steps 600]

Each step's gradient is of the weights before the last update: what a stage would train with that computes the next step
while the last one's gradients are added up and applied. A small classifier of a teacher's answers, AdamW, one process;
held-out loss, as means over the seeds, and the step at which the delayed run is where the other one was at half of its
steps and at three quarters. What they would save is `update_share` of a job (benchmarks/volunteers.py)."""

from __future__ import annotations

import argparse
import copy
import statistics
from typing import Final

import torch
from torch import nn

INPUTS, CLASSES, BATCH, EVERY = 32, 10, 64, 20
RATES: Final = (0.001, 0.003, 0.01)


def made(seed: int) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(INPUTS, 128), nn.GELU(), nn.Linear(128, 128), nn.GELU(), nn.Linear(128, CLASSES))


def held_out_losses(seed: int, rate: float, steps: int, *, delayed: bool) -> list[float]:
    """After every EVERY steps."""
    teacher, model = made(1000 + seed), made(seed)
    for one in teacher.parameters():
        one.data.mul_(2.0)
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(16_384, INPUTS, generator=generator)
    targets = teacher(inputs).argmax(dim=1).detach()
    held = slice(len(inputs) - 2048, len(inputs))
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate)
    before, losses = copy.deepcopy(model), []
    for step in range(steps):
        chosen = torch.randint(0, held.start, (BATCH,), generator=generator)
        computes = before if delayed else model
        computes.zero_grad()
        nn.functional.cross_entropy(computes(inputs[chosen]), targets[chosen]).backward()  # type: ignore[no-untyped-call]
        gradients = [one.grad for one in computes.parameters()]
        if delayed:
            before.load_state_dict(model.state_dict())  # of this step's beginning: the next gradient is of these
        for one, gradient in zip(model.parameters(), gradients, strict=True):
            one.grad = None if gradient is None else gradient.clone()
        optimizer.step()
        if (step + 1) % EVERY == 0:
            with torch.no_grad():
                losses.append(float(nn.functional.cross_entropy(model(inputs[held]), targets[held])))
    return losses


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", nargs="*", type=int, default=[1, 2, 3, 4, 5])
    parser.add_argument("--steps", type=int, default=600)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    for rate in RATES:
        both = [
            [held_out_losses(seed, rate, asked.steps, delayed=delayed) for seed in asked.seeds]
            for delayed in (False, True)
        ]
        once, later = ([statistics.mean(one) for one in zip(*runs, strict=True)] for runs in both)
        reached = []
        for part in (len(once) // 2, 3 * len(once) // 4):
            at = next((place for place, loss in enumerate(later) if loss <= once[part - 1]), None)
            reached.append(f"{part * EVERY} -> {(at + 1) * EVERY if at is not None else 'not'}")
        apart = statistics.mean(abs(one[-1] - two[-1]) for one, two in zip(*both, strict=True))
        spread = statistics.stdev(one[-1] for one in both[0])
        print(
            f"rate {rate:g}: {once[-1]:.4f}, delayed {later[-1]:.4f} (apart {apart:.4f} in the mean, seeds deviate by "
            f"{spread:.4f}); steps to the same loss: {', '.join(reached)}",
            flush=True,
        )


if __name__ == "__main__":
    main()
