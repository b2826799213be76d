"""A notice for devices that this build's CUDA kernels have no code for: their kernels run on the CPU."""

from __future__ import annotations

from typing import Final

import torch

from atoll.agent.runtime.session.session import Session
from atoll.kernels.cuda_device import why_on_cpu
from atoll.v1.common_pb2 import LEVEL_WARNING

_announced: Final[set[str]] = set()
"""In this process, which builds a strategy's worker half anew for each view."""


def announce_cpu_kernels(session: Session, device: torch.device) -> None:
    """Say once that kernels on this device's tensors run on the CPU, if they do, and what would change it."""
    missing = why_on_cpu(device)
    if missing is None or str(device) in _announced:
        return
    _announced.add(str(device))
    session.notice(
        LEVEL_WARNING,
        f"rank {session.place.rank} runs Atoll's kernels on the CPU, on copies of the GPU's tensors, which is slower: "
        f"{missing.reason}; {missing.next_step}",
    )
