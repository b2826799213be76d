"""Gradients from a GPU into pinned memory, beside the backward pass and without a thread that spins."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import Final

import torch

from atoll.errors import AtollError, PeerLost

DEPTH: Final = 2  # buffers a layer: the part of the pass before the last was selected before this pass began
_JOIN_S: Final = 5.0

Compress = Callable[[torch.Tensor], None]


class Offload:
    """Owns a side stream and the thread "atoll-offload", which `close` joins."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._buffers: dict[int, list[torch.Tensor]] = {}
        self._queue: queue.Queue[tuple[torch.cuda.Event, torch.Tensor, Compress] | None] = queue.Queue()
        self._failed: AtollError | None = None
        self._thread = threading.Thread(target=self._run, name="atoll-offload", daemon=True)
        self._thread.start()

    def submit(self, layer: int, number: int, gradient: torch.Tensor, compress: Compress) -> None:
        """Copy the flat gradient of `layer` in pass `number`, then call compress(copy) on this object's thread."""
        self.check()
        buffers = self._buffers.setdefault(
            layer, [torch.empty(gradient.shape, dtype=gradient.dtype, pin_memory=True) for _ in range(DEPTH)]
        )
        pinned = buffers[number % DEPTH]
        self._stream.wait_stream(torch.cuda.current_stream(gradient.device))
        with torch.cuda.stream(self._stream):
            pinned.copy_(gradient, non_blocking=True)
        gradient.record_stream(self._stream)
        copied = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]  # its waiter sleeps
        copied.record(self._stream)
        self._queue.put((copied, pinned, compress))

    def check(self) -> None:
        """Raises what the thread met."""
        if self._failed is not None:
            raise self._failed

    def close(self) -> None:
        self._queue.put(None)
        self._thread.join(timeout=_JOIN_S)

    def _run(self) -> None:
        while (item := self._queue.get()) is not None:
            copied, pinned, compress = item
            try:
                copied.synchronize()
                compress(pinned)
            except AtollError as error:
                self._failed = error
                return
            except RuntimeError as error:  # the device itself failed; the next hook tells the training thread
                self._failed = PeerLost(f"copying a gradient from the GPU failed: {error}")
                return
