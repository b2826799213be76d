"""The CUDA kernels on a GPU: the same bits as on the CPU, their times beside the device's copy bandwidth, and overlap.

    python benchmarks/kernels_cuda.py [--entries 88000000] [--sparsity 0.99] [--rounds 9]
        [--trace build/overlap_trace.json]

1. Every kernel is run on the GPU and on the CPU, with the same numbers: one line says whether their bits agree.
2. Times in ms, medians [fastest-slowest], of whole calls from Python, waiting for the result included. GB/s counts the
   bytes that the kernel must move; the share is of what a copy within the device's memory reaches here.
3. A training step in which each gradient is copied to pinned memory on a side stream as soon as it is there. The trace,
   for chrome://tracing, shows it; a line says how much of the copying went on beside the backward pass.

Without an NVIDIA GPU it says so and exits with 2. It exits with 1 if any bits differ.
"""

from __future__ import annotations

import argparse
import datetime
import platform
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from atoll import kernels
from atoll.kernels import compress


class Rig:
    """One gradient, its residual and an update of it, with the same numbers on every device."""

    def __init__(self, entries: int, sparsity: float, device: str) -> None:
        self.entries, self.blocks, self.device = entries, compress.block_count(entries), device
        self.gradient, self.start = self.normal(entries, 1), self.normal(entries, 2)
        self.residual = self.start.clone()
        sent = max(1, int(self.blocks * (1 - sparsity)))
        sample = np.zeros(min(2**17, self.blocks), np.float32)
        compress.sample_scores(self.gradient.cpu(), self.start.cpu(), 0, sample)
        self.block_v = float(np.quantile(sample, sparsity))
        magnitudes = (self.gradient[: 2**22] + self.start[: 2**22]).abs().cpu()
        self.element_v = float(magnitudes.sort().values[int(len(magnitudes) * sparsity)])
        self.index = torch.zeros(sent, dtype=torch.int32, device=device)
        compress.random_blocks(1, self.blocks, self.index)
        self.values = self.normal(sent * 16, 3)
        self.live = torch.zeros(entries, dtype=torch.bfloat16, device=device)
        room = sent + sent // 20 + 1  # what a threshold finds is never exactly what the sparsity leaves
        self.room = torch.zeros(room, dtype=torch.int32, device=device), torch.zeros(room * 16, device=device)
        wide = room * 16
        self.element_room = torch.zeros(wide, dtype=torch.int32, device=device), torch.zeros(wide, device=device)

    def normal(self, entries: int, seed: int) -> torch.Tensor:
        return torch.empty(entries).normal_(generator=torch.Generator().manual_seed(seed)).to(self.device)

    def reset(self) -> None:
        self.residual.copy_(self.start)


@dataclass(frozen=True)
class Operation:
    name: str
    call: Callable[[Rig], object]
    results: Callable[[Rig], list[torch.Tensor]]
    bytes_moved: Callable[[Rig], int]


def selection(name: str, call: Callable[[Rig], object], width: int) -> Operation:
    def results(rig: Rig) -> list[torch.Tensor]:
        return [rig.residual, *(rig.room if width == 16 else rig.element_room)]

    return Operation(name, call, results, lambda rig: 12 * rig.entries)


OPERATIONS = [
    selection(
        "threshold_block, feedback",
        lambda rig: compress.threshold_block(rig.gradient, rig.residual, rig.block_v, *rig.room),
        16,
    ),
    selection(
        "threshold_element, feedback",
        lambda rig: compress.threshold_element(rig.gradient, rig.residual, rig.element_v, *rig.element_room),
        1,
    ),
    selection("topk_block, feedback", lambda rig: compress.topk_block(rig.gradient, rig.residual, *rig.room), 16),
    selection(
        "topk_element, feedback", lambda rig: compress.topk_element(rig.gradient, rig.residual, *rig.element_room), 1
    ),
    selection(
        "random_block, feedback", lambda rig: compress.random_block(rig.gradient, rig.residual, 7, *rig.room), 16
    ),
    Operation(
        "scatter_blocks to bfloat16",
        lambda rig: kernels.scatter_blocks(rig.live, rig.index, rig.values),
        lambda rig: [rig.live],
        lambda rig: len(rig.index) * 96,
    ),
    Operation(
        "weighted_sum of two",
        lambda rig: kernels.weighted_sum(rig.residual, [rig.residual, rig.gradient], [0.5, 0.25]),
        lambda rig: [rig.residual],
        lambda rig: 12 * rig.entries,
    ),
]

TORCHS: dict[str, Callable[[Rig], object]] = {
    "torch: topk of abs": lambda rig: rig.gradient.abs().topk(len(rig.index) * 16),
    "torch: add, abs > v, nonzero, gather": lambda rig: above(rig.residual.add_(rig.gradient), rig.element_v),
}


def above(v: torch.Tensor, threshold: float) -> torch.Tensor:
    return v[(v.abs() > threshold).nonzero()[:, 0]]


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(a.cpu().view(torch.uint8), b.cpu().view(torch.uint8))


def check(here: Rig, there: Rig) -> bool:
    """True if both devices give the same, for every operation and on whatever the one before left behind."""
    agree = True
    for operation in OPERATIONS:
        for rig in (here, there):
            rig.reset()
        same = operation.call(here) == operation.call(there)
        pairs = zip(operation.results(here), operation.results(there), strict=True)
        same = same and all(same_bits(a, b) for a, b in pairs)
        print(f"{'same bits' if same else 'BITS DIFFER'}: {operation.name}, {here.entries} entries", flush=True)
        agree = agree and same
    return agree


def measure(rig: Rig, call: Callable[[Rig], object], rounds: int) -> list[float]:
    times_ms = []
    for _ in range(rounds + 2):
        rig.reset()
        torch.cuda.synchronize()
        begun = time.perf_counter()
        call(rig)
        torch.cuda.synchronize()
        times_ms.append((time.perf_counter() - begun) * 1e3)
    return times_ms[2:]


def row(name: str, times_ms: list[float], gigabytes: float, copy_gb_s: float) -> str:
    median = statistics.median(times_ms)
    speed = gigabytes / median * 1e3
    times = f"{median:.3f} [{min(times_ms):.3f}-{max(times_ms):.3f}]"
    return f"| {name} | {times} | {speed:.0f} | {speed / copy_gb_s:.0%} |"


def print_times(rig: Rig, rounds: int) -> None:
    print("\n| operation | ms | GB/s | of the copy |\n|---|---|---|---|")
    moved = 8 * rig.entries / 1e9
    times_ms = measure(rig, lambda rig: rig.residual.copy_(rig.gradient), rounds)
    copy_gb_s = moved / statistics.median(times_ms) * 1e3
    print(row("copy within the device", times_ms, moved, copy_gb_s))
    for operation in OPERATIONS:
        times_ms = measure(rig, operation.call, rounds)
        print(row(operation.name, times_ms, operation.bytes_moved(rig) / 1e9, copy_gb_s), flush=True)
    for name, call in TORCHS.items():
        print(row(name, measure(rig, call, rounds), 12 * rig.entries / 1e9, copy_gb_s), flush=True)


class OverlappedStep:
    """A model whose gradients leave for pinned memory on a side stream while the backward pass goes on."""

    def __init__(self, width: int = 4096, layers: int = 8, samples: int = 4096) -> None:
        self.model = torch.nn.Sequential(*(torch.nn.Linear(width, width) for _ in range(layers))).cuda()
        self.batch = torch.randn(samples, width, device="cuda")
        self.side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        shapes: dict[torch.Tensor, torch.Size] = {p: p.shape for p in self.model.parameters()}
        self.pinned = {p: torch.empty(shape, pin_memory=True) for p, shape in shapes.items()}
        for parameter in self.model.parameters():
            parameter.register_post_accumulate_grad_hook(self._leave)  # type: ignore[no-untyped-call]

    def _leave(self, parameter: torch.Tensor) -> None:
        gradient = parameter.grad
        assert gradient is not None
        self.side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.side):
            self.pinned[parameter].copy_(gradient, non_blocking=True)
        gradient.record_stream(self.side)

    def run(self) -> None:
        self.model.zero_grad(set_to_none=True)
        self.model(self.batch).square().mean().backward()
        torch.cuda.synchronize()


Span = tuple[float, float]


def shared_us(copies: list[Span], others: list[Span]) -> float:
    """Seconds for which a copy and another piece of work went on at once."""
    merged: list[Span] = []
    for begin, end in sorted(others):
        if merged and begin <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((begin, end))
    return sum(max(0.0, min(end, e) - max(begin, b)) for begin, end in copies for b, e in merged)


def print_overlap(trace: Path) -> None:
    step = OverlappedStep()
    for _ in range(3):
        step.run()
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        step.run()
    trace.parent.mkdir(parents=True, exist_ok=True)
    profile.export_chrome_trace(str(trace))
    on_device = [e for e in profile.events() if e.device_type.name == "CUDA"]
    copies: list[Span] = []
    others: list[Span] = []
    for event in on_device:
        span = (float(event.time_range.start), float(event.time_range.end))
        (copies if "DtoH" in event.name else others).append(span)
    copied_us = sum(end - begin for begin, end in copies)
    share = shared_us(copies, others) / copied_us if copied_us else 0.0
    print(
        f"\noverlap: {len(copies)} copies to pinned memory, {copied_us / 1e3:.2f} ms, {share:.0%} of it beside kernels "
        f"of the backward pass; trace in {trace}"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description="The CUDA kernels checked and timed on a GPU.")
    parser.add_argument("--entries", type=int, default=88_000_000, help="float32 entries of the gradient")
    parser.add_argument("--sparsity", type=float, default=0.99, help="share dropped")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--trace", type=Path, default=Path("build/overlap_trace.json"))
    options = parser.parse_args()
    if not (kernels.has_cuda() and torch.cuda.is_available()):
        print(
            "no NVIDIA GPU here (or torch or this build is without CUDA): nothing was checked or timed", file=sys.stderr
        )
        return 2
    print(
        f"{torch.cuda.get_device_name()}; Python {platform.python_version()}, torch {torch.__version__}, "
        f"CUDA {torch.version.cuda}; {datetime.date.today()}"
    )
    print(f"`{' '.join(['python', *sys.argv])}`: medians of {options.rounds} rounds [fastest-slowest]\n")
    agree = True
    for entries in (1, 17, 1_000_003, options.entries):
        agree = check(Rig(entries, options.sparsity, "cpu"), Rig(entries, options.sparsity, "cuda")) and agree
    print_times(Rig(options.entries, options.sparsity, "cuda"), options.rounds)
    print_overlap(options.trace)
    return 0 if agree else 1


if __name__ == "__main__":
    sys.exit(main())
