"""A staging ring: bytes of a device's tensors come to the CPU piece by piece, through a little pinned memory and on a
stream of their own, so that they neither wait for what the device computes next nor hold it up.

From pageable memory the driver copies through buffers of its own, in the order of everything else on the device; pinned
memory for all of a state is memory that nobody else can have."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import cache
from typing import Any, Final, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

PIECE_BYTES: Final = 4 << 20
DEPTH: Final = 4
"""Pieces of the ring: while one is worked on, the next ones are copied."""
LEFT_FREE_BYTES: Final = 1 << 30
LEFT_FREE_SHARE: Final = 1 / 20
"""Of a device's memory. Clones leave so much to the training that goes on beside them, and LEFT_FREE_BYTES at least."""
MOST_UPLOADED_BYTES: Final = 256 << 20
"""Of pinned memory that a device may have yet to read, unless one tensor alone has more: some 10 ms of its link."""
MOST_CPU_BYTES: Final = 32 << 20
"""Of tensors in the CPU's memory beside a device's that are cloned on the training thread: some 5 ms."""
_CLONE_ALIGNED: Final = 512  # bytes, as torch aligns what it allocates

Bytes = NDArray[np.uint8]


class CopyStream(Protocol):
    """The device's side of the ring."""

    def mark(self) -> Any:
        """This moment: all that the calling thread has queued on the device so far."""

    def pinned(self, size: int) -> torch.Tensor:
        """Memory of the CPU that the device writes into by itself, uint8 [size]."""

    def after(self, mark: Any) -> AbstractContextManager[None]:
        """Make work that is queued inside begin after the mark."""

    def copy(self, source: torch.Tensor, into: torch.Tensor, after: Any) -> Callable[[], None]:
        """Queue a copy for after a mark; calling what is returned waits for it."""

    def upload(self, source: torch.Tensor, into: torch.Tensor) -> Callable[[], None]:
        """Queue a copy from pinned memory into a device's tensor of any floating dtype, among what the calling thread
        queues; calling what is returned waits for it."""

    def has_room(self, size: int) -> bool:
        """Return whether clones of so many bytes leave enough of the device's memory to training."""

    def clone(self, tensors: Sequence[torch.Tensor], after: Any) -> tuple[list[torch.Tensor], Any]:
        """Queue clones of the device's tensors for after a mark, each contiguous; returns them and the mark of their
        end. Raises torch.OutOfMemoryError."""

    def hold(self, mark: Any) -> None:
        """Queue what the calling thread queues from now on for after that mark. No thread waits."""


class CudaCopyStream:
    """A CopyStream, of a CUDA device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def mark(self) -> torch.cuda.Event:
        now = torch.cuda.Event()  # type: ignore[no-untyped-call]
        now.record(torch.cuda.current_stream(self._device))
        return now

    def pinned(self, size: int) -> torch.Tensor:
        return torch.empty(size, dtype=torch.uint8, pin_memory=True)

    @contextmanager
    def after(self, mark: torch.cuda.Event) -> Iterator[None]:
        self._stream.wait_event(mark)
        with torch.cuda.stream(self._stream):
            yield

    def copy(self, source: torch.Tensor, into: torch.Tensor, after: torch.cuda.Event) -> Callable[[], None]:
        with self.after(after):
            into.copy_(source, non_blocking=True)
        return _end_of(self._stream)

    def upload(self, source: torch.Tensor, into: torch.Tensor) -> Callable[[], None]:
        # Of another dtype torch would convert on the CPU, into pageable memory, and wait for the copy.
        there = source if source.dtype == into.dtype else source.to(into.device, non_blocking=True)
        into.copy_(there, non_blocking=True)
        return _end_of(torch.cuda.current_stream(into.device))

    def has_room(self, size: int) -> bool:
        free, total = torch.cuda.mem_get_info(self._device)
        spare = free - max(LEFT_FREE_BYTES, int(LEFT_FREE_SHARE * total))
        return size <= spare or size <= spare + _kept_bytes(_clone_stream(self._device))

    def clone(
        self, tensors: Sequence[torch.Tensor], after: torch.cuda.Event
    ) -> tuple[list[torch.Tensor], torch.cuda.Event]:
        # The clones' memory is this stream's: torch gives it to nobody but later clones, which this stream orders
        # behind these. Copies of them on other streams have ended where their last reference goes: a host waited.
        stream = _clone_stream(self._device)
        stream.wait_event(after)
        with torch.cuda.stream(stream), torch.no_grad():
            clones = parted(torch.empty(cloned_bytes(tensors), dtype=torch.uint8, device=self._device), tensors)
            if clones:
                torch._foreach_copy_(clones, list(tensors))
        made = torch.cuda.Event()  # type: ignore[no-untyped-call]
        made.record(stream)
        return clones, made

    def hold(self, mark: torch.cuda.Event) -> None:
        torch.cuda.current_stream(self._device).wait_event(mark)


def _end_of(stream: torch.cuda.Stream) -> Callable[[], None]:
    """Return what waits, asleep, for all that was queued on this stream so far."""
    end = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]  # its waiter sleeps
    end.record(stream)
    return end.synchronize


@cache
def _clone_stream(device: torch.device) -> torch.cuda.Stream:
    """One for all rings of the process: torch keeps freed memory by stream, so each ring would keep its own."""
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


def _kept_bytes(stream: torch.cuda.Stream) -> int:
    """Return the memory that torch keeps for a stream and that nothing uses."""
    try:
        segments = torch.cuda.memory_snapshot()  # type: ignore[no-untyped-call]
    except RuntimeError:  # of an allocator that lists none
        return 0
    device, number = stream.device_index, stream.cuda_stream
    kept = [one for one in segments if one["device"] == device and one["stream"] == number]
    return sum(one["total_size"] - one["active_size"] for one in kept)


def cloned_bytes(tensors: Sequence[torch.Tensor]) -> int:
    """Return the length of one piece of memory that holds these tensors."""
    return sum(-(-one.numel() * one.element_size() // _CLONE_ALIGNED) * _CLONE_ALIGNED for one in tensors)


def parted(memory: torch.Tensor, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return contiguous views of `memory`, uint8 [cloned_bytes(tensors)], with these tensors' shapes and dtypes: one
    allocation in place of hundreds, which would take a device longer than the copies."""
    views, at = [], 0
    for one in tensors:
        size = one.numel() * one.element_size()
        views.append(memory[at : at + size].view(one.dtype).view(one.shape))
        at += cloned_bytes([one])
    return views


class StagingRing:
    """DEPTH pinned pieces, made when they are first used. One thread at a time."""

    def __init__(self, stream: CopyStream) -> None:
        self._stream = stream
        self._pieces: list[torch.Tensor] = []
        self._begun = 0
        self._after = stream.mark()

    def follow(self) -> None:
        """Copy from now on what the calling thread's queued work leaves on the device.

        It must not change until its bytes were returned."""
        self._after = self._stream.mark()

    def clones(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor] | None:
        """Return contiguous clones of these, of the device or the CPU, as the calling thread's work on the device
        leaves them, queued so far; None where there is no room. What that thread queues from now on comes after them on
        the device. What is copied from now on is of the clones."""
        on_device = [one for one in tensors if not on_cpu(one)]
        beside = sum(one.nbytes for one in tensors if on_cpu(one))
        if beside > MOST_CPU_BYTES or len({one.device for one in on_device}) > 1:
            return None
        if not self._stream.has_room(cloned_bytes(on_device)):
            return None
        try:
            found, self._after = self._stream.clone(on_device, self._stream.mark())
        except torch.OutOfMemoryError:  # e.g. another process of this device was faster
            return None
        self._stream.hold(self._after)
        clones = iter(found)
        return [
            one.detach().clone(memory_format=torch.contiguous_format) if on_cpu(one) else next(clones)
            for one in tensors
        ]

    def crossing(self, tensors: Sequence[torch.Tensor]) -> tuple[list[torch.Tensor], Callable[[], None]]:
        """Return memory of the CPU for copies of these contiguous tensors, as the calling thread's work on the device
        leaves them, queued so far, and what fills it: the ring's thread calls that. Until then nobody waits, nothing is
        copied, and they stand still; what is returned keeps them."""
        after, copies = self._stream.mark(), [torch.empty_like(one, device="cpu") for one in tensors]

        def fill() -> None:
            self._after = after
            for one, copy in zip(tensors, copies, strict=True):
                at, into = 0, copy.reshape(-1).view(torch.uint8).numpy()
                for piece in self.staged(one):
                    into[at : at + len(piece)] = piece
                    at += len(piece)

        return copies, fill

    def begin(self, source: torch.Tensor) -> Callable[[], Bytes]:
        """Begin a copy of contiguous memory of the device, at most PIECE_BYTES. Calling what is returned waits for it
        and returns its bytes, which hold until the DEPTH-th copy after it begins."""
        flat = source.detach().reshape(-1).view(torch.uint8)
        if len(self._pieces) < DEPTH:
            self._pieces.append(self._stream.pinned(PIECE_BYTES))
        into = self._pieces[self._begun % DEPTH][: flat.numel()]
        self._begun += 1
        wait = self._stream.copy(flat, into, self._after)

        def taken() -> Bytes:
            wait()
            _ = flat  # held until then: its memory is nobody else's
            return into.numpy()

        return taken

    def staged(self, tensor: torch.Tensor) -> Iterator[Bytes]:
        """The bytes of a device's tensor in row-major order, a piece at a time, each valid until the next."""
        if not tensor.is_contiguous():
            tensor = tensor.contiguous()
            self.follow()
        plain = torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor.resolve_neg()
        flat = plain.detach().reshape(-1).view(torch.uint8)
        return ahead(self.begin(flat[at : at + PIECE_BYTES]) for at in range(0, flat.numel(), PIECE_BYTES))


class PinnedUploads:
    """Copies of the CPU's memory into a device's tensors, among what the calling thread queues there: it waits for none
    as long as MOST_UPLOADED_BYTES suffice. One thread at a time."""

    def __init__(self, stream: CopyStream) -> None:
        self._stream = stream
        self._under_way: deque[tuple[torch.Tensor, Callable[[], None]]] = deque()  # oldest first

    def write(self, fill: Callable[[torch.Tensor], None], into: torch.Tensor) -> None:
        """fill: writes the content, float32 of `into`'s length, into what it is given."""
        size = into.numel() * torch.float32.itemsize
        while self._under_way and sum(one.nbytes for one, _ in self._under_way) + size > MOST_UPLOADED_BYTES:
            _, wait = self._under_way.popleft()
            wait()
        memory = self._stream.pinned(size).view(torch.float32)  # torch keeps it for the next of its size
        fill(memory)
        self._under_way.append((memory, self._stream.upload(memory, into)))


def staging_ring(device: torch.device) -> StagingRing | None:
    """None for the CPU, whose memory is read where it is."""
    return StagingRing(CudaCopyStream(device)) if device.type == "cuda" else None


def to_cpu(tensor: torch.Tensor) -> torch.Tensor:
    """Return a small tensor in the CPU's memory: itself, or a copy once all that the current stream has queued is done.

    From a GPU it comes through pinned memory, which torch keeps for the next one: at the link's full rate, and without
    a thread that spins meanwhile. For tensors of a step, which come again in the same sizes."""
    if tensor.device.type != "cuda":
        return tensor.cpu()
    copy = torch.empty_like(tensor, device="cpu", pin_memory=True)
    copy.copy_(tensor, non_blocking=True)
    _end_of(torch.cuda.current_stream(tensor.device))()
    return copy


def on_cpu(tensor: torch.Tensor) -> bool:
    return tensor.device.type == "cpu"


def ahead(begun: Iterable[Callable[[], Bytes]]) -> Iterator[Bytes]:
    """Yield what the copies return, in order, while others are under way. begun: begins each when it is asked for."""
    under_way: deque[Callable[[], Bytes]] = deque()
    for one in begun:
        under_way.append(one)
        if len(under_way) == DEPTH:
            yield under_way.popleft()()
    while under_way:
        yield under_way.popleft()()
