"""The kernels' memory throughput beside torch's, on buffers too large for any cache.

    python benchmarks/kernels_memory.py [--entries 88000000] [--rounds 9]

Each round runs every operation once, ours and torch's in turn, so that a slow moment of the machine hits both. An
operation streams 352 MB or more, so nothing it reads is left in a cache. GB/s counts bytes read and written, once each.
"""

from __future__ import annotations

import argparse
import datetime
import os
import platform
import statistics
import sys
import time
import timeit
from collections.abc import Callable
from dataclasses import dataclass

import torch
from lab.machine import processor

from atoll import kernels


@dataclass(frozen=True)
class Operation:
    name: str
    bytes_per_entry: int
    ours: Callable[[int], object]
    torchs: Callable[[], object]
    torch_name: str


def operations(entries: int) -> list[Operation]:
    x = torch.rand(entries)
    return [
        Operation(
            "squared_norm(x)",
            4,
            lambda threads: kernels.squared_norm(x, threads),
            lambda: torch.linalg.vector_norm(x, dtype=torch.float64),
            "vector_norm, float64",
        ),
        Operation(
            "squared_norm(x)",
            4,
            lambda threads: kernels.squared_norm(x, threads),
            lambda: torch.dot(x, x),
            "dot, float32 (inexact)",
        ),
    ]


def seconds(call: Callable[..., object], *arguments: int) -> float:
    begun = time.perf_counter()
    call(*arguments)
    return time.perf_counter() - begun


def cell(times_s: list[float], moved_bytes: int) -> str:
    slow, fast = moved_bytes / max(times_s) / 1e9, moved_bytes / min(times_s) / 1e9
    return f"{moved_bytes / statistics.median(times_s) / 1e9:.1f} [{slow:.1f}-{fast:.1f}]"


def print_throughput(entries: int, rounds: int) -> None:
    print("| kernel | threads | ours, GB/s | torch, GB/s | torch's operation | ours/torch |")
    print("|---|---|---|---|---|---|")
    todo = operations(entries)
    for threads in (1, 2):
        torch.set_num_threads(threads)
        times: list[tuple[list[float], list[float]]] = [([], []) for _ in todo]
        for _ in range(rounds):
            for operation, (ours, torchs) in zip(todo, times, strict=True):
                ours.append(seconds(operation.ours, threads))
                torchs.append(seconds(operation.torchs))
        for operation, (ours, torchs) in zip(todo, times, strict=True):
            moved = operation.bytes_per_entry * entries
            ratio = statistics.median(torchs) / statistics.median(ours)
            print(
                f"| {operation.name} | {threads} | {cell(ours, moved)} | {cell(torchs, moved)} "
                f"| {operation.torch_name} | {ratio:.2f}x |"
            )


def print_call_cost() -> None:
    """Of calls on 8 entries: what a call costs beyond its work."""
    x = torch.ones(8)
    array = x.numpy()
    calls: list[tuple[str, Callable[[], object]]] = [
        ("squared_norm, torch tensor", lambda: kernels.squared_norm(x)),
        ("squared_norm, NumPy array", lambda: kernels.squared_norm(array)),
    ]
    print("\n| call on 8 entries | us |\n|---|---|")
    for name, call in calls:
        times = [t / 10_000 * 1e6 for t in timeit.repeat(call, number=10_000, repeat=5)]
        print(f"| {name} | {statistics.median(times):.2f} [{min(times):.2f}-{max(times):.2f}] |")


def main() -> None:
    parser = argparse.ArgumentParser(description="The kernels' memory throughput beside torch's.")
    parser.add_argument("--entries", type=int, default=88_000_000, help="float32 entries of the buffer")
    parser.add_argument("--rounds", type=int, default=9)
    options = parser.parse_args()
    print(
        f"{processor()}, {os.cpu_count()} cores; Python {platform.python_version()}, torch {torch.__version__}, ",
        end="",
    )
    print(f"path {kernels.cpu_features()['path']}; {datetime.date.today()}")
    print(f"`{' '.join(['python', *sys.argv])}`: medians of {options.rounds} rounds [slowest-fastest]\n")
    print_throughput(options.entries, options.rounds)
    print_call_cost()


if __name__ == "__main__":
    main()
