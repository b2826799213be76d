"""Measures what an exchange of updates costs a processor, by how often each tensor has its turn.

    python benchmarks/scan_cost.py [--entries 25000000] [--every 1,2,4,8]

One rank alone, eight tensors, live weights that change as a whole in every step; the exchange engine's own processor
time of a step, in milliseconds, the mean over whole cycles of turns: for the choice of entries, which reads weights and
shared parameters of what is due, and codes what it chose; for summing and applying it to the shared parameters; and for
live weights. With `every` H, H times the density sends as much in a step.
"""

from __future__ import annotations

import argparse
import datetime
import platform
import statistics
import sys
from typing import Final

import torch

from atoll.kernels.compress import block_count
from atoll.kernels.exchange_engine import UpdateEngine, Values

TENSORS: Final = 8
CASES: Final[tuple[tuple[float, Values], ...]] = ((0.01, "float16"), (0.05, "int2"), (0.2, "int2"))
CYCLES: Final = 4
DEADLINE_S: Final = 60.0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--entries", type=int, default=25_000_000)
    parser.add_argument("--every", default="1,2,4,8", help="steps between two turns of a tensor, up to 8")
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    print(
        f"{datetime.date.today()}  {platform.machine()}  torch {torch.__version__}  {options.entries / 1e6:g} M entries"
    )
    print("| density, values | every | choice ms | sums ms | live ms |\n|---|---|---|---|---|")
    for density, values in CASES:
        for every in map(int, options.every.split(",")):
            took = " | ".join(f"{one:.1f}" for one in measured_ms(options.entries // TENSORS, density, values, every))
            print(f"| {density:g}, {values} | {every} | {took} |", flush=True)
    return 0


def measured_ms(entries: int, density: float, values: Values, every: int) -> list[float]:
    """entries: of a tensor."""
    engine = UpdateEngine(
        rank=0, islands=[[0]], threads=1, values=values, selection="threshold", digest_every=0, seed=1, first_round=1,
        every=every, replicas=True,
    )  # fmt: skip
    lives = [torch.randn(entries) for _ in range(TENSORS)]
    for number, live in enumerate(lives):
        engine.add_tensor(order=number, shared_param=live.clone(), live=live, turn=number % every)
    k_blocks = [round(density * block_count(entries))] * TENSORS
    updates = [1e-3 * torch.randn(entries) for _ in range(3)]
    took: list[tuple[float, float, float]] = []
    for step in range(1, every * (CYCLES + 2) + 1):
        for live in lives:
            live.add_(updates[step % 3])
        engine.sum_updates(step, 1.0, k_blocks, k_blocks)
        engine.fetch(range(TENSORS), step, DEADLINE_S)
        stats = engine.take_stats()
        took.append((stats.compress_s, stats.sum_s + stats.update_s, stats.publish_s))
    engine.close()
    return [1e3 * statistics.mean(one) for one in zip(*took[2 * every :], strict=True)]  # thresholds have adapted


if __name__ == "__main__":
    sys.exit(main())
