"""Failures of machines, drawn from a seed: each machine's and each rack's in a Poisson process of its own rate."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import numpy as np

DAY_S: Final = 86_400.0


@dataclass(frozen=True, slots=True)
class FailureRates:
    """machine_per_day: failures of a machine and day, of which the share `hardware` loses its memory, and the rest only
    the process. rack_per_day: failures of a rack and day, of `rack_machines` consecutive machines, all losing memory;
    0 for no racks."""

    machine_per_day: float
    hardware: float
    rack_per_day: float = 0.0
    rack_machines: int = 0


@dataclass(frozen=True, slots=True)
class Failure:
    """machines: whose memory is gone; none where it was a process."""

    at_s: float
    machines: tuple[int, ...]


def failures(rates: FailureRates, machines: int, end_s: float, seed: int) -> Iterator[Failure]:
    """In order of time, until the end. The same seed gives the same failures, whoever recovers from them."""
    rng = np.random.Generator(np.random.PCG64(seed))
    racks = -(-machines // rates.rack_machines) if rates.rack_machines else 0
    alone_s, together_s = machines * rates.machine_per_day / DAY_S, racks * rates.rack_per_day / DAY_S
    if not alone_s + together_s > 0:
        return
    now_s = 0.0
    while True:
        now_s += float(rng.exponential(1 / (alone_s + together_s)))
        if now_s >= end_s:
            return
        if rng.random() * (alone_s + together_s) < together_s:
            first = int(rng.integers(racks)) * rates.rack_machines
            yield Failure(now_s, tuple(range(first, min(first + rates.rack_machines, machines))))
        else:
            machine, hardware = int(rng.integers(machines)), rng.random() < rates.hardware
            yield Failure(now_s, (machine,) if hardware else ())
