"""Compression, wire and sparse optimizers beside what torch offers, on a gradient too large for any cache.

    python benchmarks/kernels_compress.py [--entries 88000000] [--rounds 5] [--sparsities 0.9 0.95 0.99 0.999]
                                          [--huge-pages]

Prints markdown: times in ms, medians [fastest-slowest]. Compression streams 0.7 GB a call, so nothing it reads is left
in a cache; before each sparse step the caches are filled with something else. Thresholds and indices are those of the
sparsity: 0.99 leaves 1 %. Error feedback starts from a residual of zeros each time.
"""

from __future__ import annotations

import argparse
import datetime
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import torch
from lab.machine import processor

sys.path[:0] = [str(Path(__file__).resolve().parents[1] / "tests" / "kernels")]

import block_coo
import native_parts
from sparse_rules import adam_blocks, sgd_blocks

from atoll import kernels
from atoll.kernels import compress
from atoll.kernels.pages import use_huge_pages
from atoll.strategies.compressed.codes.sparse_codes import largest_places

Call = Callable[[], object]


class Rig:
    """Buffers for one gradient, made once."""

    def __init__(self, entries: int, huge_pages: bool) -> None:
        generator = torch.Generator().manual_seed(0)
        self.entries, self.blocks = entries, compress.block_count(entries)
        self.gradient, self.residual = torch.empty(entries), torch.empty(entries)
        if huge_pages:
            use_huge_pages(self.gradient)
            use_huge_pages(self.residual)
        self.gradient.normal_(generator=generator)
        self.residual.zero_()
        self.cold = torch.zeros(2**25)  # 128 MiB

    def evict(self) -> None:
        self.cold.add_(1.0)

    def clear(self) -> None:
        self.residual.zero_()

    def room(self, sparsity: float) -> tuple[torch.Tensor, torch.Tensor]:
        """For 5 % more than the sparsity leaves: what a threshold finds is never exactly that."""
        count = int(self.entries / 16 * (1 - sparsity) * 1.05) + 1
        return torch.zeros(count, dtype=torch.int32), torch.zeros(count * 16)


def measure(call: Call, before: Call, rounds: int) -> list[float]:
    times_ms = []
    for _ in range(rounds):
        before()
        begun = time.perf_counter()
        call()
        times_ms.append((time.perf_counter() - begun) * 1e3)
    return times_ms


def cell(times_ms: list[float]) -> str:
    return f"{statistics.median(times_ms):.2f} [{min(times_ms):.2f}-{max(times_ms):.2f}]"


def compressions(rig: Rig, sparsity: float) -> dict[str, Callable[[int], object]]:
    sample = np.zeros(min(2**17, rig.blocks), np.float32)
    compress.sample_scores(rig.gradient, None, 0, sample)
    block_v = float(np.quantile(sample, sparsity))
    blocks = rig.room(sparsity)
    g, r = rig.gradient, rig.residual
    return {
        "threshold_block, feedback": lambda threads: compress.threshold_block(g, r, block_v, *blocks, threads=threads),
        "threshold_block": lambda threads: compress.threshold_block(g, None, block_v, *blocks, threads=threads),
        "topk_block, feedback": lambda threads: compress.topk_block(g, r, *blocks, threads=threads),
        "random_block, feedback": lambda threads: compress.random_block(g, r, 1, *blocks, threads=threads),
        # The residual, all zeros, stands for live weights.
        "difference_block": lambda threads: native_parts.load().difference_block(g, r, 1.0, block_v, *blocks, threads),
    }


def torch_compressions(rig: Rig, sparsity: float) -> dict[str, Call]:
    element_v = float(rig.gradient[: 2**22].abs().sort().values[int(min(2**22, rig.entries) * sparsity)])

    def threshold() -> torch.Tensor:
        index = (rig.gradient.abs() > element_v).nonzero()[:, 0]
        return rig.gradient[index]

    def blocks() -> torch.Tensor:
        rows = rig.gradient[: rig.entries // 16 * 16].view(-1, 16)
        norms = torch.linalg.vector_norm(rows, ord=1, dim=1)
        return rows[(norms > element_v * 7).nonzero()[:, 0]]

    def largest() -> torch.Tensor:
        rig.residual.add_(rig.gradient)
        return largest_places(rig.residual, int(rig.entries * (1 - sparsity)))

    return {
        "largest entries, of strategy `compressed`, feedback": largest,
        "torch.topk of abs": lambda: rig.gradient.abs().topk(int(rig.entries * (1 - sparsity))),
        "torch abs > v, nonzero, gather": threshold,
        "torch block norms, nonzero, gather": blocks,
    }


def print_compression(rig: Rig, sparsities: list[float], rounds: int) -> None:
    print("\n| compression | sparsity | 1 thread, ms | 2 threads, ms |\n|---|---|---|---|")
    for sparsity in sparsities:
        for name, call in compressions(rig, sparsity).items():
            cells = [cell(measure(partial(call, t), rig.clear, rounds)) for t in (1, 2)]
            print(f"| {name} | {sparsity:g} | {cells[0]} | {cells[1]} |", flush=True)
    for name in torch_compressions(rig, 0.99):
        cells = []
        for threads in (1, 2):
            torch.set_num_threads(threads)
            cells.append(cell(measure(torch_compressions(rig, 0.99)[name], rig.clear, 1 if "topk" in name else 3)))
        print(f"| {name} | 0.99 | {cells[0]} | {cells[1]} |", flush=True)


class Update:
    """The selection at a sparsity, as blocks and as single entries, and the state it is applied to."""

    def __init__(self, rig: Rig, sparsity: float) -> None:
        self.rig = rig
        self.shared_param, self.momentum = rig.gradient, rig.residual  # their memory; what they hold no longer matters
        self.second = torch.zeros(rig.entries)
        self.live = torch.zeros(rig.entries, dtype=torch.bfloat16)
        self.last_step = torch.zeros(rig.blocks, dtype=torch.int32)
        self.count = int(rig.blocks * (1 - sparsity))
        self.index, self.other = (np.zeros(self.count, np.uint32) for _ in range(2))
        block_coo.random_blocks(1, rig.blocks, self.index)
        block_coo.random_blocks(2, rig.blocks, self.other)
        self.values = torch.full((self.count, 16), 1e-3)
        self.elements = np.zeros(self.count * 16, np.uint32)  # "blocks" of one entry
        block_coo.random_blocks(3, rig.entries, self.elements)
        self.elements_long = torch.from_numpy(self.elements.astype(np.int64))
        self.payload = np.zeros(block_coo.payload_bound(self.count), np.uint8)
        self.sum_index, self.sum_values = np.zeros(2 * self.count, np.uint32), torch.zeros(2 * self.count, 16)

    def momentum_step(self, threads: int) -> None:
        sgd_blocks(
            self.shared_param,
            self.index,
            self.values,
            lr=1e-3,
            momentum=0.9,
            momentum_buffer=self.momentum,
            threads=threads,
        )

    def lazy_step(self, threads: int) -> None:
        sgd_blocks(
            self.shared_param, self.index, self.values, lr=1e-3, momentum=0.9, momentum_buffer=self.momentum,
            last_step=self.last_step, threads=threads,
        )  # fmt: skip

    def live_step(self, threads: int) -> None:
        sgd_blocks(
            self.shared_param, self.index, self.values, lr=1e-3, momentum=0.9, momentum_buffer=self.momentum,
            live=self.live, threads=threads,
        )  # fmt: skip

    def adam_step(self, threads: int) -> None:
        adam_blocks(
            self.shared_param, self.index, self.values, lr=1e-3, step=1, first_moment=self.momentum,
            second_moment=self.second, threads=threads,
        )  # fmt: skip

    def torch_elements(self, threads: int) -> None:
        torch.set_num_threads(threads)
        at, g = self.elements_long, self.values.view(-1)
        m = self.momentum[at].mul_(0.9).add_(g)
        self.momentum[at] = m
        self.shared_param[at] = self.shared_param[at].add_(m, alpha=-1e-3)

    def encode(self, _threads: int) -> int:
        return block_coo.encode(self.index, self.values, self.rig.entries, self.payload)

    def decode(self, _threads: int) -> None:
        size = block_coo.encode(self.index, self.values, self.rig.entries, self.payload)
        self.rig.evict()
        begun = time.perf_counter()
        block_coo.decode(self.payload[:size], self.rig.entries, self.index, self.values)
        self.decoded_ms = (time.perf_counter() - begun) * 1e3

    def sum_blocks(self, threads: int) -> None:
        block_coo.sum_units(
            [self.index, self.other], [self.values] * 2, self.sum_index, self.sum_values, threads=threads
        )


def print_updates(rig: Rig, sparsity: float, rounds: int) -> None:
    update = Update(rig, sparsity)
    calls: dict[str, Callable[[int], object]] = {
        "sgd_blocks, momentum": update.momentum_step,
        "sgd_blocks, momentum, lazy decay": update.lazy_step,
        "sgd_blocks, momentum, bfloat16 live copy": update.live_step,
        "adam_blocks": update.adam_step,
        "torch, momentum, as many single entries": update.torch_elements,
        "encode, delta, float32": update.encode,
        "sum_units of two workers": update.sum_blocks,
    }
    print(f"\n| on {update.count} blocks of {rig.blocks} | 1 thread, ms | 2 threads, ms |\n|---|---|---|")
    for name, call in calls.items():
        cells = [cell(measure(partial(call, t), rig.evict, rounds)) for t in (1, 2)]
        print(f"| {name} | {cells[0]} | {cells[1]} |", flush=True)
    decoded_ms = []
    for _ in range(rounds):
        update.decode(1)
        decoded_ms.append(update.decoded_ms)
    print(f"| decode, delta, float32 | {cell(decoded_ms)} | |", flush=True)


def print_dense(rig: Rig, rounds: int) -> None:
    parameter = torch.nn.Parameter(rig.residual)
    parameter.grad = rig.gradient
    optimizer = torch.optim.SGD([parameter], lr=1e-3, momentum=0.9, fused=True)
    cells = []
    for threads in (1, 2):
        torch.set_num_threads(threads)
        optimizer.step()
        cells.append(cell(measure(optimizer.step, rig.evict, rounds)))
    print(f"| torch SGD momentum, fused, dense | {cells[0]} | {cells[1]} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description="The sparse kernels' times beside torch's.")
    parser.add_argument("--entries", type=int, default=88_000_000, help="float32 entries of the gradient")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--huge-pages", action="store_true", help="gradient, residual, parameters, momentum on 2 MiB pages"
    )
    parser.add_argument("--sparsities", type=float, nargs="+", default=[0.9, 0.95, 0.99, 0.999], help="shares dropped")
    options = parser.parse_args()
    print(
        f"{processor()}, {os.cpu_count()} cores; Python {platform.python_version()}, torch {torch.__version__}, "
        f"path {kernels.cpu_features()['path']}; {datetime.date.today()}"
    )
    print(f"`{' '.join(['python', *sys.argv])}`: medians of {options.rounds} rounds [fastest-slowest]")
    rig = Rig(options.entries, options.huge_pages)
    print_compression(rig, options.sparsities, options.rounds)
    print_updates(rig, 0.99, options.rounds)
    print_dense(rig, options.rounds)


if __name__ == "__main__":
    main()
