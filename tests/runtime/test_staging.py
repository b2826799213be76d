"""The staging ring and who reads through it, with a device that copies as late as it may: when it is waited for.

On a GPU none of this was run: `test_on_a_gpu` is skipped aloud where there is none."""

from __future__ import annotations

import io
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pytest
import torch

from atoll.agent.runtime.checkpoints.disk.tensorfile import bytes_of, deserialized, serialized
from atoll.agent.runtime.checkpoints.memory.shards import live_state
from atoll.agent.runtime.checkpoints.memory.shards.live_state import Piece, Sources
from atoll.agent.runtime.staging import DEPTH, PIECE_BYTES, CudaCopyStream, StagingRing
from atoll.errors import AtollError
from atoll.strategies.shared_masters.offload import Offload, PinnedRing

BIG = 3 * PIECE_BYTES // 4 + 5  # float32 entries: three pieces, the last a part of one


@dataclass(eq=False)
class _Copy:
    source: torch.Tensor
    into: torch.Tensor


class LateStream:
    """A CopyStream on the CPU. A copy reads when somebody waits for it or for a later one, as on a stream."""

    def __init__(self) -> None:
        self.queued: list[_Copy] = []
        self.pinned_bytes = self.most_under_way = 0
        self.marks = 0

    def mark(self) -> int:
        self.marks += 1
        return self.marks

    def pinned(self, size: int) -> torch.Tensor:
        self.pinned_bytes += size
        return torch.empty(size, dtype=torch.uint8)

    def copy(self, source: torch.Tensor, into: torch.Tensor, after: int) -> Callable[[], None]:
        assert 1 <= after <= self.marks
        one = _Copy(source, into)
        self.queued.append(one)
        self.most_under_way = max(self.most_under_way, len(self.queued))

        def wait() -> None:
            while one in self.queued:
                earliest = self.queued.pop(0)
                earliest.into.copy_(earliest.source)

        return wait


@pytest.fixture(autouse=True)
def off_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors count as a device's."""
    monkeypatch.setattr(live_state, "on_cpu", lambda _tensor: False)


def test_pieces_come_in_order_through_bounded_memory() -> None:
    stream, tensor = LateStream(), torch.randn(10 * BIG)
    seen = [piece.copy() for piece in StagingRing(stream).staged(tensor)]
    assert np.array_equal(np.concatenate(seen), np.frombuffer(bytes_of(tensor), np.uint8))
    assert max(map(len, seen)) == PIECE_BYTES
    assert stream.pinned_bytes == DEPTH * PIECE_BYTES
    assert list(StagingRing(stream).staged(torch.empty(0))) == []
    turned = torch.randn(7, 5, dtype=torch.complex64).t().conj()
    (rows,) = StagingRing(stream).staged(turned)
    assert rows.tobytes() == bytes(bytes_of(turned.contiguous()))


def test_a_shard_of_small_and_large_tensors_is_whole() -> None:
    """1. Small pieces are on their way while a large one takes all of the ring. 2. Nobody's are overwritten."""
    tensors = [torch.randn(n) for n in (3, BIG, 1, 17, 2 * BIG, 5, 6, 7, 8)]
    pieces, at = [], 0
    for index, one in enumerate(tensors):
        pieces.append((one, Piece(index, 0, one.nbytes, at)))
        at += one.nbytes
    data, stream = np.zeros(at, np.uint8), LateStream()
    for _ in Sources(StagingRing(stream)).copies(pieces, data):
        pass
    assert np.array_equal(data, np.concatenate([np.frombuffer(bytes_of(one), np.uint8) for one in tensors]))
    assert stream.most_under_way == DEPTH
    assert stream.pinned_bytes == DEPTH * PIECE_BYTES


def test_a_checkpoint_is_written_from_the_device_without_a_copy_of_all() -> None:
    """The parts of a file are read one after the other, each before the next one comes."""
    stream = LateStream()
    tensors = {"big": torch.randn(2 * BIG), "half": torch.randn(9, 4).half().t(), "none": torch.empty(0, 3)}
    file = b"".join(bytes(part) for part in serialized(tensors, lambda _device: StagingRing(stream)))
    assert file == b"".join(bytes(part) for part in serialized(tensors))
    found, _ = deserialized(io.BytesIO(file), len(file))
    assert all(torch.equal(found[name], one) for name, one in tensors.items())
    assert stream.pinned_bytes == DEPTH * PIECE_BYTES


def test_pinned_memory_of_an_exchange_is_bounded_and_nobodys_twice() -> None:
    """1. Two pinned buffers a layer were twice the model in memory that cannot be swapped. 2. One ring is given out in
    turns; a part that the engine may still read is waited for first, the oldest first."""
    waited: list[int] = []
    ring = PinnedRing(LateStream(), 1000, waited.append)
    ring.room(1, 300)
    ring.room(2, 300)
    assert waited == []
    third = ring.room(3, 400)  # from the start again: what was left at the end is too short
    assert waited == [1, 2]
    fourth = ring.room(4, 500)
    assert waited == [1, 2]
    assert third.data_ptr() + 400 <= fourth.data_ptr()
    ring.room(5, 1000)
    assert waited == [1, 2, 3, 4]


def test_layers_are_handed_on_in_order_and_a_failure_is_raised_where_training_waits() -> None:
    stream, seen, released = LateStream(), [], []
    layers = [torch.randn(n).to(torch.bfloat16) for n in (5, 8, 3)]
    offload = Offload(stream, [one.nbytes for one in layers], released.append)
    try:
        for _ in range(3):
            for number, one in enumerate(layers):
                offload.submit(number, one, lambda copied: seen.append(copied.clone()))
        offload.drain(20)
        assert len(seen) == 9
        assert all(torch.equal(copied, layers[index % 3]) for index, copied in enumerate(seen))
        assert released == [0, 1, 2, 0, 1, 2, 0, 1]  # a part of 64 bytes at least, of which the ring has one

        def fails(_: torch.Tensor) -> None:
            raise AtollError("the engine is gone")

        offload.submit(0, layers[0], fails)
        with pytest.raises(AtollError, match="the engine is gone"):
            offload.drain(20)
    finally:
        offload.close()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here: the staging ring was NOT run on a device")
def test_on_a_gpu() -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    tensor = torch.randn(10 * BIG, device=device)
    ring = StagingRing(CudaCopyStream(device))
    for _ in range(3):
        tensor += 1  # queued, not done
        ring.follow()
        seen = np.concatenate([piece.copy() for piece in ring.staged(tensor)])
        assert np.array_equal(seen, np.frombuffer(bytes_of(tensor.cpu()), np.uint8))
