"""Prints how fast this CPU multiplies matrices: python -m atoll.agent.telemetry.cpu_work. See work.py."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Final

import numpy as np

SIZE: Final = 256
BUDGET_S: Final = 0.2
SAMPLE_S: Final = 0.002
"""Shorter than a time slice of the scheduler, so that on a busy CPU some samples hold no waiting."""


def best_rate(operations: int, seconds: Callable[[int], float], sample_s: float) -> float:
    """Return the operations a second of a calculation, the best of samples of about sample_s, within BUDGET_S.

    seconds: of so many calculations in a row. The first ones load the library, start threads and wake clocks."""
    seconds(3)
    times = max(1, round(sample_s / seconds(4) * 4))
    samples: list[float] = []
    ends_s = time.perf_counter() + BUDGET_S
    while len(samples) < 3 or time.perf_counter() < ends_s:
        samples.append(seconds(times))
    return operations * times / min(samples)


def multiplications_per_s() -> float:
    """Return the floating-point operations a second of a float32 matrix product.

    What others take at this moment would make a good device look useless; what they take for long, training shows."""
    left, right = np.linspace(0, 1, 2 * SIZE * SIZE, dtype=np.float32).reshape(2, SIZE, SIZE)  # any numbers do
    product = np.empty_like(left)

    def seconds(times: int) -> float:
        began_s = time.perf_counter()
        for _ in range(times):
            np.matmul(left, right, out=product)
        return time.perf_counter() - began_s

    return best_rate(2 * SIZE**3, seconds, SAMPLE_S)


if __name__ == "__main__":
    print(json.dumps([multiplications_per_s()]))
