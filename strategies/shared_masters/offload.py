"""Gradients or weights from a GPU into pinned memory, beside what the GPU does next and without a thread that spins."""

from __future__ import annotations

import queue
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Final

import torch

from atoll.errors import AtollError, DeadlineExceeded, PeerLost

DEPTH: Final = 2  # buffers a layer: the part of the pass before the last was selected before this pass began
_JOIN_S: Final = 5.0

Compress = Callable[[torch.Tensor], None]


class Offload:
    """Owns a side stream and the thread "atoll-offload", which `close` joins."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._buffers: dict[int, list[torch.Tensor]] = {}
        self._queue: queue.Queue[tuple[int, torch.cuda.Event, torch.Tensor, Compress] | None] = queue.Queue()
        self._failed: AtollError | None = None
        self._under_way: Counter[int] = Counter()  # by layer
        self._done = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="atoll-offload", daemon=True)
        self._thread.start()

    def submit(self, layer: int, number: int, tensor: torch.Tensor, compress: Compress) -> None:
        """Copy the flat gradient, or weights, of `layer` in round `number`, then call compress(copy) on this object's
        thread. The caller writes into `tensor` again only after `drain`, or never."""
        self.check()
        buffers = self._buffers.setdefault(
            layer, [torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True) for _ in range(DEPTH)]
        )
        pinned = buffers[number % DEPTH]
        self._stream.wait_stream(torch.cuda.current_stream(tensor.device))
        with torch.cuda.stream(self._stream):
            pinned.copy_(tensor, non_blocking=True)
        tensor.record_stream(self._stream)
        copied = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]  # its waiter sleeps
        copied.record(self._stream)
        with self._done:
            self._under_way[layer] += 1
        self._queue.put((layer, copied, pinned, compress))

    def drain(self, deadline_s: float, layers: Sequence[int] = ()) -> None:
        """Wait until everything submitted of these layers, none given: of all, was copied and handed on. Raises what
        the thread met, or DeadlineExceeded."""
        with self._done:
            in_time = self._done.wait_for(lambda: self._failed is not None or self._quiet(layers), deadline_s)
        self.check()
        if not in_time:
            raise DeadlineExceeded(f"copies from the GPU were still under way after {deadline_s:.0f} s")

    def check(self) -> None:
        """Raises what the thread met."""
        if self._failed is not None:
            raise self._failed

    def close(self) -> None:
        self._queue.put(None)
        self._thread.join(timeout=_JOIN_S)

    def _run(self) -> None:
        while (item := self._queue.get()) is not None:
            layer, copied, pinned, compress = item
            try:
                copied.synchronize()
                compress(pinned)
                self._note_done(layer)
            except AtollError as error:
                self._give_up(error)
                return
            except RuntimeError as error:  # the device itself failed; the next hook tells the training thread
                self._give_up(PeerLost(f"copying from the GPU failed: {error}"))
                return

    def _quiet(self, layers: Sequence[int]) -> bool:
        return not any(self._under_way[layer] for layer in layers) if layers else self._under_way.total() == 0

    def _note_done(self, layer: int) -> None:
        with self._done:
            self._under_way[layer] -= 1
            self._done.notify_all()

    def _give_up(self, error: AtollError) -> None:
        with self._done:
            self._failed = error
            self._done.notify_all()
