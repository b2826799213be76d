"""Work on a GPU's data beside its next computation, without a thread that spins.

It copies weights into pinned memory, and runs any other work that is submitted."""

from __future__ import annotations

import queue
import threading
from collections import Counter, deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final

import torch

from atoll.agent.runtime.staging import CopyStream
from atoll.errors import AtollError, DeadlineExceeded

RING_BYTES: Final = 256 << 20
"""Bytes of pinned memory, unless one layer alone has more: two threads select from so many in some 30 ms."""
_JOIN_S: Final = 5.0

Compress = Callable[[torch.Tensor], None]
Released = Callable[[int], None]
Work = Callable[[Any], None]


class PinnedRing:
    """One piece of pinned memory that is lent in turns. A part is lent again only after its reader is done."""

    def __init__(self, stream: CopyStream, size: int, released: Released) -> None:
        """released: returns when nothing reads the part that was lent for a layer any more."""
        self._memory, self._released = stream.pinned(size), released
        self._lent: deque[tuple[int, int, int]] = deque()  # begin, end, layer; oldest first
        self._next = 0

    def room(self, layer: int, size: int) -> torch.Tensor:
        """Lend uint8 [size] to a layer; at most as much as the ring has."""
        begin = self._next if self._next + size <= self._memory.numel() else 0
        end = begin + size
        while any(first < end and begin < last for first, last, _ in self._lent):
            self._released(self._lent.popleft()[2])
        self._lent.append((begin, end, layer))
        self._next = -(-end // 64) * 64  # any entry's alignment, and no cache line is shared
        return self._memory[begin:end]


class Offload:
    """Owner of the thread "atoll-offload", which `close` joins."""

    def __init__(self, stream: CopyStream, layer_bytes: Sequence[int], released: Released) -> None:
        """layer_bytes: sizes of the weights to submit. released: as for PinnedRing."""
        self._stream = stream
        self._ring_bytes, self._released = max(*layer_bytes, min(RING_BYTES, 2 * sum(layer_bytes))), released
        self._ring: PinnedRing | None = None  # where weights are copied at all
        self._queue: queue.Queue[tuple[int, Any, Work] | None] = queue.Queue()
        self._failed: Exception | None = None
        self._under_way: Counter[int] = Counter()  # by layer
        self._done = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="atoll-offload", daemon=True)
        self._thread.start()

    def submit(self, layer: int, tensor: torch.Tensor, compress: Compress) -> None:
        """Copy the flat weights of `layer`, then call compress(copy) on this object's thread.

        The caller writes into `tensor` again only after `drain`."""
        self.run(layer, partial(self._copy, layer, tensor, compress))

    def run(self, layer: int, work: Work) -> None:
        """Call work(mark) on this object's thread, for `layer`.

        It works after everything that the calling thread has queued on the device so far. `work` references what it
        reads."""
        self.check()
        with self._done:
            self._under_way[layer] += 1
        self._queue.put((layer, self._stream.mark(), work))

    def drain(self, deadline_s: float, layers: Sequence[int] = ()) -> None:
        """Wait until everything submitted of these layers was copied and compressed. No layers: of all.

        Raises the thread's error, or DeadlineExceeded."""
        with self._done:
            in_time = self._done.wait_for(lambda: self._failed is not None or self._quiet(layers), deadline_s)
        self.check()
        if not in_time:
            raise DeadlineExceeded(f"copies from the GPU were still under way after {deadline_s:.0f} s")

    def check(self) -> None:
        """Raise the thread's error, if there is one."""
        if self._failed is not None:
            raise self._failed

    def close(self) -> None:
        self._queue.put(None)
        self._thread.join(timeout=_JOIN_S)

    def _run(self) -> None:
        while (item := self._queue.get()) is not None:
            layer, mark, work = item
            try:
                work(mark)
                del item, work  # with the memory that it referenced
                self._note_done(layer)
            except (AtollError, RuntimeError) as error:  # RuntimeError: of the device; the training thread raises it
                self._give_up(error)
                return

    def _copy(self, layer: int, tensor: torch.Tensor, compress: Compress, mark: Any) -> None:
        if self._ring is None:
            self._ring = PinnedRing(self._stream, self._ring_bytes, self._released)
        into = self._ring.room(layer, tensor.nbytes)
        self._stream.copy(tensor.view(torch.uint8), into, mark)()
        compress(into.view(tensor.dtype))

    def _quiet(self, layers: Sequence[int]) -> bool:
        return not any(self._under_way[layer] for layer in layers) if layers else self._under_way.total() == 0

    def _note_done(self, layer: int) -> None:
        with self._done:
            self._under_way[layer] -= 1
            self._done.notify_all()

    def _give_up(self, error: Exception) -> None:
        with self._done:
            self._failed = error
            self._done.notify_all()
