"""The state of a step boundary as a row of bytes, without a copy: which tensors, in which order, from where to where.

Nothing is serialised per step. Which tensors there are is looked at again only where one of them is another than the
step before; what is no tensor (learning rates, a scheduler's counters) is small and packed each time."""

from __future__ import annotations

import json
import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import numpy as np
import torch
import xxhash

from atoll.agent.runtime.checkpoints.disk.state import pack_state
from atoll.agent.runtime.checkpoints.disk.tensorfile import DTYPE_NAMES, DTYPES, bytes_of
from atoll.agent.runtime.checkpoints.memory.shards.shard_file import CHUNK_BYTES, Bytes
from atoll.agent.runtime.model.snapshot import Snapshot
from atoll.agent.runtime.staging import DEPTH, PIECE_BYTES, StagingRing, on_cpu
from atoll.errors import CheckpointError

SERIAL_ENTRIES: Final = 32_000
"""torch copies fewer than 32,768 entries without its other threads, whose processors training may have in use: waiting
for them at every MiB took 10 times as long as the copy."""


@dataclass(frozen=True, slots=True)
class Piece:
    """Bytes [begin, end) of a tensor, which go to `to` of a shard's data."""

    tensor: int
    begin: int
    end: int
    to: int

    def parts(self) -> Iterator[Piece]:
        """Yield the piece in parts of at most PIECE_BYTES, as a staging ring takes them."""
        for begin in range(self.begin, self.end, PIECE_BYTES):
            end = min(begin + PIECE_BYTES, self.end)
            yield Piece(self.tensor, begin, end, self.to + begin - self.begin)


@dataclass(frozen=True, slots=True)
class Layout:
    """Layout of the state. sizes: bytes of each tensor, in order."""

    raw: bytes
    digest: bytes
    sizes: tuple[int, ...]

    @property
    def total(self) -> int:
        return sum(self.sizes)

    def pieces(self, begin: int, end: int) -> list[Piece]:
        """Return the pieces of the shard [begin, end) of the state: whole tensors, but where it begins and ends."""
        return pieces_of(self.sizes, begin, end)

    def chunks(self, begin: int, end: int) -> list[list[Piece]]:
        """Return the pieces of each chunk of the shard [begin, end) of the state."""
        filled: list[list[Piece]] = [[] for _ in range(-(-(end - begin) // CHUNK_BYTES))]
        for piece in self.pieces(begin, end):
            at = piece.to
            while at < piece.to + piece.end - piece.begin:
                chunk, first = at // CHUNK_BYTES, piece.begin + at - piece.to
                last = min(piece.end, first + (chunk + 1) * CHUNK_BYTES - at)
                filled[chunk].append(Piece(piece.tensor, first, last, at))
                at += last - first
        return filled


def pieces_of(sizes: Sequence[int], begin: int, end: int) -> list[Piece]:
    """Return the pieces of bytes [begin, end) of tensors of these sizes, one after the other."""
    found, start = [], 0
    for index, size in enumerate(sizes):
        at, stop = max(start, begin), min(start + size, end)
        if at < stop:
            found.append(Piece(index, at - start, stop - start, at - begin))
        start += size
    return found


class LiveState:
    """`look` at a boundary; then the tensors may be read until the next optimizer.step()."""

    def __init__(self, snapshot: Snapshot, *, view: int = 1) -> None:
        self._snapshot, self._view = snapshot, view
        self._identity: list[Any] | None = None
        self._resting: list[torch.Tensor] = []
        self._entries: list[tuple[str, str, list[int]]] = []
        self._tree: Any = None
        self._model: dict[str, Any] = {}
        self._moved: list[tuple[str, str, list[int]]] = []
        self.layout = Layout(b"", b"", ())
        self.tensors: list[torch.Tensor] = []
        self.moving: Any = None

    def look(self) -> None:
        """Raises CheckpointError for a state that no checkpoint can hold."""
        identity = self._snapshot.identity()
        changed = identity != self._identity
        if changed:
            tensors, self._tree = pack_state(self._snapshot.resting())
            model = self._snapshot.states()["model"]
            self._model = self._snapshot.prepared.to_json()
            self._entries, self._resting = listed(tensors), list(tensors.values())
            self._identity = identity if all(isinstance(one, torch.Tensor) for one in model.values()) else None
        moving, self.moving = pack_state(self._snapshot.moving())
        moved = listed(moving)
        if changed or moved != self._moved:
            self._moved = moved
            self.layout = laid_out(self._entries + moved, self._tree, self._model, self._view)
        self.tensors = [*self._resting, *moving.values()]


class Sources:
    """The bytes of live tensors. Kept from step to step for tensors that lie still in CPU memory."""

    def __init__(self, ring: StagingRing | None = None) -> None:
        """ring: through which those come that are on a device."""
        self._ring = ring
        self._views: dict[int, tuple[torch.Tensor, Bytes]] = {}

    def copy(self, tensor: torch.Tensor, piece: Piece, into: Bytes) -> None:
        """Copy a piece into a shard's data. Without the GIL where it is long.

        tensor: any shape, dtype and device, read as its bytes in row-major order. into: uint8 [bytes of the shard]."""
        for _ in self.copies([(tensor, piece)], into):
            pass

    def copies(self, wanted: Iterable[tuple[torch.Tensor, Piece]], into: Bytes) -> Iterator[None]:
        """Copy like `copy`, one piece for each iteration. Pieces on a device are on their way by then, in parts of
        PIECE_BYTES."""
        if self._ring is None:
            for tensor, piece in wanted:
                self._copy(tensor, piece, _target(piece, into))
                yield
            return
        copied: deque[Callable[[], None]] = deque()
        for tensor, piece in wanted:
            for part in piece.parts():
                copied.append(self._begin(self._ring, tensor, part, _target(part, into)))
                if len(copied) == DEPTH:
                    yield copied.popleft()()
        while copied:
            yield copied.popleft()()

    def _begin(self, ring: StagingRing, tensor: torch.Tensor, piece: Piece, target: Bytes) -> Callable[[], None]:
        if on_cpu(tensor) or not tensor.is_contiguous():
            return partial(self._copy, tensor, piece, target)
        taken = ring.begin(tensor.detach().reshape(-1).view(torch.uint8)[piece.begin : piece.end])
        return lambda: np.copyto(target, taken())

    def _copy(self, tensor: torch.Tensor, piece: Piece, target: Bytes) -> None:
        known = self._views.get(piece.tensor)
        if known is not None and known[0] is tensor:
            np.copyto(target, known[1][piece.begin : piece.end])
        elif not tensor.is_contiguous():
            _gather(tensor.detach(), piece.begin, piece.end, target)
        else:
            view = np.frombuffer(bytes_of(tensor.detach()), np.uint8)
            self._views[piece.tensor] = (tensor, view)
            np.copyto(target, view[piece.begin : piece.end])


def _target(piece: Piece, into: Bytes) -> Bytes:
    return into[piece.to : piece.to + piece.end - piece.begin]


def _gather(tensor: torch.Tensor, begin: int, end: int, target: Bytes) -> None:
    """Copy bytes [begin, end) of a tensor's row-major order, a few entries at a time: none of it is held twice.

    tensor: any strides and device. target: uint8 [end - begin]."""
    width = tensor.element_size()
    most = SERIAL_ENTRIES if tensor.device.type == "cpu" else CHUNK_BYTES // width
    buffer = torch.empty(most, dtype=tensor.dtype, device=tensor.device)
    stop = -(-end // width)
    for first in range(begin // width, stop, most):
        last, at = min(first + most, stop), 0
        for part in _parts(tensor, first, last):
            buffer[at : at + part.numel()].view(part.shape).copy_(part)
            at += part.numel()
        start, upto = max(begin, first * width), min(end, last * width)
        filled = buffer.view(torch.uint8)[start - first * width : upto - first * width]
        np.copyto(target[start - begin : upto - begin], filled.cpu().numpy())


def _parts(tensor: torch.Tensor, begin: int, end: int) -> Iterator[torch.Tensor]:
    """Entries [begin, end) of a tensor's row-major order, as views: at most two for each of its dimensions."""
    if begin == end:
        return
    if tensor.dim() == 1:
        yield tensor[begin:end]
        return
    row = tensor.numel() // tensor.shape[0]
    first, last = -(-begin // row), end // row  # whole rows are [first, last)
    if first > last:  # all within one row
        yield from _parts(tensor[last], begin - last * row, end - last * row)
        return
    if begin < first * row:
        yield from _parts(tensor[first - 1], begin - (first - 1) * row, row)
    if first < last:
        yield tensor[first:last]
    if end > last * row:
        yield from _parts(tensor[last], 0, end - last * row)


def listed(tensors: Mapping[str, torch.Tensor]) -> list[tuple[str, str, list[int]]]:
    for name, tensor in tensors.items():
        if tensor.dtype not in DTYPE_NAMES:
            raise CheckpointError(f"tensor {name} is {tensor.dtype}, which a checkpoint cannot hold; convert it")
    return [(name, DTYPE_NAMES[tensor.dtype], list(tensor.shape)) for name, tensor in tensors.items()]


def laid_out(
    entries: Sequence[tuple[str, str, list[int]]], tree: Any, model: Mapping[str, Any], view: int = 1
) -> Layout:
    """view: of the run. Who goes back trains the same steps again, in another one: its shards are no others' state."""
    raw = json.dumps({"tensors": entries, "tree": tree, "model": model, "view": view}).encode()
    return Layout(raw, xxhash.xxh3_128_digest(raw), tuple(size_of(dtype, shape) for _, dtype, shape in entries))


def size_of(dtype: str, shape: Sequence[int]) -> int:
    return math.prod(shape) * DTYPES[dtype].itemsize
