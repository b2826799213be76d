"""Prints how fast this CPU multiplies matrices: python -m atoll.agent.telemetry.cpu_work. See work.py."""

from __future__ import annotations

import json
import time
from typing import Final

import numpy as np

SIZE: Final = 256
BUDGET_S: Final = 0.2
SAMPLE_S: Final = 0.002
"""Shorter than a time slice of the scheduler, so that on a busy CPU some samples hold no waiting."""


def multiplications_per_s() -> float:
    """Floating-point operations a second of a float32 matrix product: the best of samples of about 2 ms.

    What others take at this moment would make a good device look useless; what they take for long, training shows."""
    left, right = np.linspace(0, 1, 2 * SIZE * SIZE, dtype=np.float32).reshape(2, SIZE, SIZE)  # any numbers do
    product = np.empty_like(left)

    def seconds(times: int) -> float:
        began_s = time.perf_counter()
        for _ in range(times):
            np.matmul(left, right, out=product)
        return time.perf_counter() - began_s

    seconds(2)  # starts the threads, touches the pages
    times = max(1, round(SAMPLE_S / seconds(4) * 4))
    samples: list[float] = []
    ends_s = time.perf_counter() + BUDGET_S
    while len(samples) < 3 or time.perf_counter() < ends_s:
        samples.append(seconds(times))
    return 2 * SIZE**3 * times / min(samples)


if __name__ == "__main__":
    print(json.dumps([multiplications_per_s()]))
