"""Stage 2: every kernel has the bits of its CPU twin, and how much of the device's copy bandwidth it reaches.

    python -P -m gpu_check.kernels          the bits alone, of small buffers: what compute-sanitizer runs

GB/s counts the bytes that a kernel must move. Times are medians of whole calls by CUDA events; a selection's call waits
for its result. Calls take turns on buffers that together are larger than the device's L2 cache."""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final

import torch

from atoll import kernels
from atoll.kernels import compress, signs
from gpu_check.rows import Rows

SIZES: Final = {"cuda": (1_000_003, 25_000_000, 88_000_000), "cpu": (100_003,)}
"""float32 entries."""
SMALL_SIZES: Final = (17, 4_099, 70_001)
SPARSITY: Final = 0.99
ROTATED_BYTES: Final = 256 << 20
"""Of the buffers that calls take turns on: several times the largest L2 cache."""
ROUNDS: Final = 5
AHEAD_CYCLES: Final = 4_000_000
"""The device sleeps so long before a round, so that it never waits for the host to queue the next call."""


class Buffers:
    """Inputs and outputs of every kernel, with the same numbers on every device."""

    def __init__(self, entries: int, device: str) -> None:
        self.entries, self.device, self.blocks = entries, device, compress.block_count(entries)
        generator = torch.Generator().manual_seed(entries)

        def normal(count: int) -> torch.Tensor:
            return torch.empty(count).normal_(generator=generator).to(device)

        self.gradient, self.start = normal(entries), normal(entries)
        self.residual = self.start.clone()
        chosen = max(1, int(self.blocks * (1 - SPARSITY)))
        self.block_v = 20.0  # of 16 magnitudes of a normal number with variance 2: about one block in a hundred
        self.scores = torch.zeros(min(1 << 17, self.blocks), device=device)
        room = min(self.blocks, 2 * chosen + 1)
        self.block_room = torch.zeros(room, dtype=torch.int32, device=device), torch.zeros(room * 16, device=device)
        self.sign_bits = torch.randint(256, (signs.sign_bytes(entries),), dtype=torch.uint8, generator=generator).to(
            device
        )
        self.sign_scales = normal(2 * signs.sign_blocks(entries)).abs()

    def reset(self) -> None:
        self.residual.copy_(self.start)
        for output in self.block_room:
            output.fill_(7)  # what an earlier call left there would look like a result


@dataclass(frozen=True, slots=True)
class Operation:
    call: Callable[[Buffers], object]
    """Returns what must be equal on all devices, beside the results."""
    results: Callable[[Buffers], Sequence[torch.Tensor]]
    bytes_moved: Callable[[Buffers], int]


def _selected(one: Buffers) -> list[torch.Tensor]:
    return [one.residual, *one.block_room]


def _of_twelve(one: Buffers) -> int:
    return 12 * one.entries


OPERATIONS: Final[dict[str, Operation]] = {
    "threshold_block": Operation(
        lambda one: compress.threshold_block(one.gradient, one.residual, one.block_v, *one.block_room),
        _selected, _of_twelve,
    ),
    "topk_block": Operation(
        lambda one: compress.topk_block(one.gradient, one.residual, *one.block_room), _selected, _of_twelve
    ),
    "random_block": Operation(
        lambda one: compress.random_block(one.gradient, one.residual, 7, *one.block_room), _selected, _of_twelve
    ),
    "sample_scores": Operation(
        lambda one: compress.sample_scores(one.gradient, one.residual, 3, one.scores),
        lambda one: [one.scores],
        lambda one: 132 * len(one.scores),
    ),
    "sign_encode": Operation(
        lambda one: signs.sign_encode(one.residual, one.sign_bits, one.sign_scales, two_sided=True),
        lambda one: [one.residual, one.sign_bits, one.sign_scales], lambda one: 8 * one.entries + one.entries // 8,
    ),
    "sign_add": Operation(
        lambda one: signs.sign_add(one.sign_bits, one.sign_scales, one.residual, two_sided=True),
        lambda one: [one.residual], lambda one: 8 * one.entries + one.entries // 8,
    ),
}  # fmt: skip


def run(device: str, rows: Rows) -> None:
    if device == "cuda" and not kernels.has_cuda():
        rows.check("CUDA kernels", False, "this build has none, or the driver shows no device: see stage 0")
        return
    copies = {entries: _rotated(entries, device) for entries in SIZES[device]}
    twins = {entries: Buffers(entries, "cpu") for entries in copies}
    whole = {entries: _gb_per_s(sets, _copied, 8 * entries) for entries, sets in copies.items()}
    rows.check("copy within the device", True, _text(whole, whole), **_figures(whole))
    for name, operation in OPERATIONS.items():
        differ = [entries for entries, sets in copies.items() if not equal(operation, sets[0], twins[entries])]
        reached = {
            entries: _gb_per_s(sets, operation.call, operation.bytes_moved(sets[0])) for entries, sets in copies.items()
        }
        wrong = f"BITS DIFFER from the CPU's at {differ}; " if differ else ""
        rows.check(name, not differ, wrong + _text(reached, whole), **_figures(reached))


def equal(operation: Operation, one: Buffers, twin: Buffers) -> bool:
    """Return whether the operation has the same bits on both."""
    for each in (one, twin):
        each.reset()
    same = operation.call(one) == operation.call(twin)
    pairs = zip(operation.results(one), operation.results(twin), strict=True)
    return same and all(torch.equal(_bytes(a), _bytes(b)) for a, b in pairs)


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.cpu().contiguous().view(torch.uint8)


def _rotated(entries: int, device: str) -> Sequence[Buffers]:
    count = 1 if device == "cpu" else max(1, -(-ROTATED_BYTES // (8 * entries)))
    return [Buffers(entries, device) for _ in range(count)]


def _copied(one: Buffers) -> None:
    one.residual.copy_(one.gradient)


def _gb_per_s(sets: Sequence[Buffers], call: Callable[[Buffers], object], moved: int) -> float:
    times_s: list[float] = []
    call(sets[0])
    for _ in range(ROUNDS):
        for one in sets:
            one.reset()
        times_s += _times_on_device(sets, call) if sets[0].device == "cuda" else _times_on_cpu(sets, call)
    return moved / statistics.median(times_s) / 1e9


def _times_on_cpu(sets: Sequence[Buffers], call: Callable[[Buffers], object]) -> list[float]:
    times_s = []
    for one in sets:
        begun_s = time.perf_counter()
        call(one)
        times_s.append(time.perf_counter() - begun_s)
    return times_s


def _times_on_device(sets: Sequence[Buffers], call: Callable[[Buffers], object]) -> list[float]:
    event = partial(torch.cuda.Event, enable_timing=True)
    marks = [(event(), event()) for _ in sets]
    torch.cuda.synchronize()
    torch.cuda._sleep(AHEAD_CYCLES)  # type: ignore[no-untyped-call]
    for one, (begun, ended) in zip(sets, marks, strict=True):
        begun.record()
        call(one)
        ended.record()
    torch.cuda.synchronize()
    return [begun.elapsed_time(ended) / 1e3 for begun, ended in marks[1:] or marks]


def _text(reached: dict[int, float], whole: dict[int, float]) -> str:
    parts = (f"{entries / 1e6:.3g} M: {one:.0f} GB/s, {one / whole[entries]:.0%}" for entries, one in reached.items())
    return "; ".join(parts)


def _figures(reached: dict[int, float]) -> dict[str, float]:
    return {f"gb_per_s_{entries}": one for entries, one in reached.items()}


def main() -> int:
    device = "cuda" if kernels.has_cuda() else "cpu"
    differ = [
        f"{name} at {entries}"
        for entries in SMALL_SIZES
        for pair in ((Buffers(entries, device), Buffers(entries, "cpu")),)
        for name, operation in OPERATIONS.items()
        if not equal(operation, *pair)
    ]
    print(f"{len(OPERATIONS)} kernels on {device}: {', '.join(differ) or 'same bits'}")
    return int(bool(differ))


if __name__ == "__main__":
    sys.exit(main())
