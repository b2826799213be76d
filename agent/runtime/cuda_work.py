"""Prints how fast each visible GPU multiplies matrices: python -m atoll.agent.runtime.cuda_work.

See telemetry/work.py. It is here because it needs torch, which the daemon never loads. A GPU counts by the format in
which it is fastest, since jobs train in that one: by float32 without TF32 a gaming card would rank before an H100.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Final

import torch

from atoll.agent.telemetry.cpu_work import best_rate
from atoll.agent.telemetry.shared_gpu import shared_rate

SIZE: Final = 4096
"""Fills the largest GPU; a product takes 17 ms on one of 8 TFLOP/s."""
SAMPLE_S: Final = 0.01
FORMATS: Final = (torch.bfloat16, torch.float16, torch.float32)


def fastest(rate_of: Callable[[torch.dtype], float]) -> float:
    """Return the highest of the formats' rates; 0 if none works. rate_of: raises RuntimeError where one does not."""
    rates = [0.0]
    for dtype in FORMATS:
        try:
            rates.append(rate_of(dtype))
        except RuntimeError:  # no memory left, or a format that this GPU does not have
            continue
    return max(rates)


def multiplications_per_s(device: torch.device, dtype: torch.dtype) -> float:
    """Return the floating-point operations a second of a matrix product on the device."""
    left = torch.rand((SIZE, SIZE), device=device).to(dtype)
    product = torch.empty_like(left)

    def seconds(times: int) -> float:
        torch.cuda.synchronize(device)
        began_s = time.perf_counter()
        for _ in range(times):
            torch.matmul(left, left, out=product)
        torch.cuda.synchronize(device)
        return time.perf_counter() - began_s

    return best_rate(2 * SIZE**3, seconds, SAMPLE_S)


def main() -> None:
    """Print one number for each GPU, 0 for one that has no memory left or fails.

    Arguments: of each GPU the descriptor of its file (`shared_rate`) where agents share it, else -1; none: all -1."""
    devices = [torch.device("cuda", index) for index in range(torch.cuda.device_count())]
    files = [int(number) for number in sys.argv[1:]] or [-1] * len(devices)
    rates = []
    for device, file in zip(devices, files, strict=True):
        measure = partial(fastest, partial(multiplications_per_s, device))
        rates.append(measure() if file < 0 else shared_rate(file, measure))
    print(json.dumps(rates))


if __name__ == "__main__":
    main()
