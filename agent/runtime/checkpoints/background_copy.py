"""Copies a boundary's state on a thread while training goes on, up to the update that changes it; on a device that
has room for a clone of the state, beyond that update too."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from contextlib import nullcontext
from typing import Final

import numpy as np
import torch

from atoll.agent.runtime.checkpoints.disk.tensorfile import bytes_of
from atoll.agent.runtime.checkpoints.memory.shards.live_state import Piece, Sources
from atoll.agent.runtime.model.snapshot import Snapshot
from atoll.agent.runtime.staging import StagingRing
from atoll.errors import CheckpointError

LONGEST_WAIT_S: Final = 60.0
"""Seconds that an update waits until its state was copied."""


class BackgroundCopy:
    """`tensors` on the copying thread, `wait` on the training thread before the state changes."""

    def __init__(
        self,
        snapshot: Snapshot,
        live: Mapping[str, torch.Tensor],
        device: torch.device,
        ring: StagingRing | None,
    ) -> None:
        """live: tensors that stand still until the next update. ring: of the device, None: of the CPU."""
        self._snapshot, self._live, self._device, self._ring = snapshot, live, device, ring
        self._read = threading.Event()
        self._late = False
        clones = ring.clones(list(live.values())) if ring is not None else None
        self._apart = clones is not None  # from what the update changes
        if clones is not None:
            self._live = dict(zip(live, clones, strict=True))
            self._read.set()
        else:
            if ring is not None:
                ring.follow()
            snapshot.reads_begin()

    def tensors(self) -> dict[str, torch.Tensor]:
        """Copies, in CPU memory. Raises CheckpointError where training could not wait for it."""
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)  # each thread has a current one of its own
        try:
            with nullcontext() if self._apart else self._snapshot.readable():
                copies = {name: _copied(tensor, self._ring) for name, tensor in self._live.items()}
            if not self._apart:
                self._snapshot.check_unmoved()
        finally:
            self._live = {}
            self._read.set()
        if self._late:
            raise CheckpointError(f"copying its state took over {LONGEST_WAIT_S:.0f} s, and training went on")
        return copies

    def wait(self) -> None:
        """The state is about to change: until it was copied, or no longer than LONGEST_WAIT_S."""
        self._late = self._late or not self._read.wait(LONGEST_WAIT_S)


def _copied(tensor: torch.Tensor, ring: StagingRing | None) -> torch.Tensor:
    """Copy on one thread, because training may use the other processors."""
    copy = torch.empty(tensor.shape, dtype=tensor.dtype)
    if copy.nbytes:
        Sources(ring).copy(tensor, Piece(0, 0, copy.nbytes, 0), np.frombuffer(bytes_of(copy), np.uint8))
    return copy
