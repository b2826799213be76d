from __future__ import annotations

from pathlib import Path

import pytest
import torch

from atoll.agent.runtime.step.measures.peak_memory import (
    EVERY_STEPS,
    FIRST_STEPS,
    NOT_MEASURED,
    CudaMemory,
    HostMemory,
    PeakMemory,
)


class FakeMemory:
    """A device of 5,000 bytes whose steps take 1,000 bytes and 10 for each sample."""

    falls = True

    def __init__(self) -> None:
        self.batch = self.forgotten = 0

    def used_bytes(self) -> int:
        return 1000

    def peak_bytes(self) -> int:
        return 1000 + 10 * self.batch

    def forget_peak(self) -> None:
        self.forgotten += 1

    def memory_bytes(self) -> int:
        return 5000


def test_memory_is_looked_at_in_the_first_steps_of_a_batch_and_rarely_after() -> None:
    gauge = FakeMemory()
    memory = PeakMemory(gauge)
    assert memory.end_step() == NOT_MEASURED
    looks = []
    for step in range(2 * EVERY_STEPS):
        gauge.batch = 100
        memory.begin(100)
        if memory.end_step() != NOT_MEASURED:
            looks.append(step + 1)
    assert looks == [*range(1, FIRST_STEPS + 1), EVERY_STEPS, 2 * EVERY_STEPS]
    assert gauge.forgotten == 1
    gauge.batch = 150
    memory.begin(150)
    assert memory.end_step() == (2500, 5000, 350)
    assert gauge.forgotten == 2


def test_without_a_gauge_nothing_is_measured() -> None:
    memory = PeakMemory(None)
    memory.begin(3)
    assert memory.end_step() == NOT_MEASURED


def test_a_process_knows_its_peak_and_forgets_it() -> None:
    gauge = HostMemory(1)
    gauge.forget_peak()
    before = gauge.peak_bytes()
    large = torch.ones(30_000_000)
    assert gauge.peak_bytes() >= before + large.nbytes * 0.9
    assert gauge.memory_bytes() > gauge.used_bytes() > large.nbytes
    del large
    gauge.forget_peak()
    assert gauge.peak_bytes() < before + 60_000_000


def test_workers_of_a_machine_share_what_is_left(tmp_path: Path) -> None:
    (tmp_path / "status").write_text("Name:\tpython\nVmHWM:\t  2048 kB\nVmRSS:\t  1024 kB\n")
    alone, paired = HostMemory(1, tmp_path), HostMemory(2, tmp_path)
    assert (alone.used_bytes(), alone.peak_bytes()) == (1 << 20, 2 << 20)
    assert alone.memory_bytes() > paired.memory_bytes() > 1 << 20
    assert HostMemory(1, tmp_path / "missing").peak_bytes() == 0


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_the_allocators_peak_counts_on_a_gpu() -> None:
    gauge = CudaMemory(torch.device("cuda", 0), 1)
    base = gauge.used_bytes()
    peaks = []
    for samples in (100, 200):
        gauge.forget_peak()
        kept = torch.ones(samples, 1 << 20, device="cuda")
        peaks.append(gauge.peak_bytes() - base)
        del kept
    assert peaks[1] == pytest.approx(2 * peaks[0], rel=0.01)
    shared = CudaMemory(torch.device("cuda", 0), 4)
    assert shared.memory_bytes() <= gauge.memory_bytes() / 2
