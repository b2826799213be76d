"""A staging ring: bytes of a device's tensors come to the CPU piece by piece, through a little pinned memory and on a
stream of their own, so that they neither wait for what the device computes next nor hold it up.

From pageable memory the driver copies through buffers of its own, in the order of everything else on the device; pinned
memory for all of a state is memory that nobody else can have."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Final, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

PIECE_BYTES: Final = 4 << 20
DEPTH: Final = 4
"""Pieces of the ring: while one is worked on, the next ones are copied."""

Bytes = NDArray[np.uint8]


class CopyStream(Protocol):
    """The device's side of the ring."""

    def mark(self) -> Any:
        """This moment: all that the calling thread has queued on the device so far."""

    def pinned(self, size: int) -> torch.Tensor:
        """Memory of the CPU that the device writes into by itself, uint8 [size]."""

    def after(self, mark: Any) -> AbstractContextManager[None]:
        """What is queued within is for after that mark."""

    def copy(self, source: torch.Tensor, into: torch.Tensor, after: Any) -> Callable[[], None]:
        """Queue a copy for after a mark; calling what is returned waits for it."""


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
        copied = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]  # its waiter sleeps
        copied.record(self._stream)
        return copied.synchronize


class StagingRing:
    """DEPTH pinned pieces, made when they are first used. One thread at a time."""

    def __init__(self, stream: CopyStream) -> None:
        self._stream = stream
        self._pieces: list[torch.Tensor] = []
        self._begun = 0
        self._after = stream.mark()

    def follow(self) -> None:
        """What is copied from now on is as the calling thread's work on the device leaves it, queued so far; it stands
        still until its bytes were returned."""
        self._after = self._stream.mark()

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


def staging_ring(device: torch.device) -> StagingRing | None:
    """None for the CPU, whose memory is read where it is."""
    return StagingRing(CudaCopyStream(device)) if device.type == "cuda" else None


def ahead(begun: Iterable[Callable[[], Bytes]]) -> Iterator[Bytes]:
    """What the copies return, in order, with others under way. begun: begins each when it is asked for."""
    under_way: deque[Callable[[], Bytes]] = deque()
    for one in begun:
        under_way.append(one)
        if len(under_way) == DEPTH:
            yield under_way.popleft()()
    while under_way:
        yield under_way.popleft()()
