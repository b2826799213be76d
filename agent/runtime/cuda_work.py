"""Prints how fast each visible GPU multiplies matrices: python -m atoll.agent.runtime.cuda_work.

See telemetry/work.py. It is here because it needs torch, which the daemon never loads.
"""

from __future__ import annotations

import json
import time
from typing import Final

import torch

SIZE: Final = 2048
BUDGET_S: Final = 0.2


def multiplications_per_s(device: torch.device) -> float:
    """Floating-point operations a second of a float32 matrix product on the device: the best of its samples."""
    left = torch.rand((SIZE, SIZE), device=device)
    product = torch.empty_like(left)

    def seconds(times: int) -> float:
        torch.cuda.synchronize(device)
        began_s = time.perf_counter()
        for _ in range(times):
            torch.matmul(left, left, out=product)
        torch.cuda.synchronize(device)
        return time.perf_counter() - began_s

    seconds(3)  # loads the library, wakes the clocks
    times = max(1, round(0.01 / seconds(4) * 4))
    samples: list[float] = []
    ends_s = time.perf_counter() + BUDGET_S
    while len(samples) < 3 or time.perf_counter() < ends_s:
        samples.append(seconds(times))
    return 2 * SIZE**3 * times / min(samples)


def main() -> None:
    """One number for each GPU, 0 for one that has no memory left or fails."""
    rates = []
    for index in range(torch.cuda.device_count()):
        try:
            rates.append(multiplications_per_s(torch.device("cuda", index)))
        except RuntimeError:  # torch.cuda.OutOfMemoryError is one
            rates.append(0.0)
    print(json.dumps(rates))


if __name__ == "__main__":
    main()
