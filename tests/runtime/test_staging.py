"""The staging ring and who reads through it, with a device that copies as late as it may: when it is waited for.

On a GPU none of this was run: `test_on_a_gpu` is skipped aloud where there is none."""

from __future__ import annotations

import io

import numpy as np
import pytest
import torch
from late_stream import LateStream, count_as_a_devices
from torch import nn

from atoll.agent.runtime import staging
from atoll.agent.runtime.checkpoints.disk.tensorfile import bytes_of, deserialized, serialized
from atoll.agent.runtime.checkpoints.memory.shards.live_state import Piece, Sources
from atoll.agent.runtime.staging import DEPTH, PIECE_BYTES, CudaCopyStream, PinnedUploads, StagingRing, to_cpu
from atoll.errors import AtollError
from atoll.strategies.shared_params.offload import Offload, PinnedRing

BIG = 3 * PIECE_BYTES // 4 + 5  # float32 entries: three pieces, the last a part of one


@pytest.fixture(autouse=True)
def off_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    count_as_a_devices(monkeypatch)


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


def test_clones_are_made_before_what_training_queues_next_and_read_after_it() -> None:
    """1. The state is cloned where it is, in an order of the device's: no thread waits. 2. Training writes it at once.
    3. What comes to the CPU, later, is what was there before."""
    stream = LateStream()
    ring = StagingRing(stream)
    state = [torch.randn(BIG), torch.randn(7, 5).t(), torch.tensor(3.0).half(), torch.empty(0, 4), torch.ones(3) > 0]
    state.append(nn.Parameter(torch.randn(4, 3, 2, 2).to(memory_format=torch.channels_last)))
    expected = [bytes(bytes_of(one.detach().contiguous())) for one in state]
    clones = ring.clones(state)
    assert clones is not None
    with torch.no_grad():
        for one in state:
            one.zero_()
    assert all(one.is_contiguous() and one.shape == live.shape for one, live in zip(clones, state, strict=True))
    assert [b"".join(piece.tobytes() for piece in ring.staged(one)) for one in clones] == expected


def test_tensors_cross_when_the_thread_that_needs_them_asks() -> None:
    """1. A hook of the backward pass hands tensors over, twice, and waits for nothing. 2. Each is copied behind what
    was queued when it was handed over, where another thread asks."""
    stream = LateStream()
    ring, tensors = StagingRing(stream), [torch.randn(BIG), torch.randn(7)]
    handed = [ring.crossing(tensors[:1]), ring.crossing(tensors)]
    assert stream.queued == []
    assert stream.pinned_bytes == 0
    for copies, fill in handed:
        fill()
        assert all(torch.equal(copy, one) for copy, one in zip(copies, tensors, strict=False))
    assert stream.copied_after == [2] * 4 + [3] * 5  # the first mark is the ring's own
    assert stream.pinned_bytes == DEPTH * PIECE_BYTES


def test_uploads_wait_for_the_oldest_alone_once_pinned_memory_is_used_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """1. Three tensors of a third of the bound are queued without a wait. 2. The fourth waits for the first. 3. One
    that is larger than the bound waits for all before it. 4. Each arrives as it was written, in the device's dtype."""
    monkeypatch.setattr(staging, "MOST_UPLOADED_BYTES", 3 * 4 * 10)
    stream = LateStream()
    uploads, arrived = PinnedUploads(stream), [torch.zeros(10, dtype=torch.bfloat16) for _ in range(4)]
    arrived.append(torch.zeros(50))
    under_way = []
    for value, into in enumerate(arrived, 1):
        uploads.write(lambda memory, value=value: memory.fill_(value), into)  # type: ignore[misc]
        under_way.append(len(stream.queued))
    assert under_way == [1, 2, 3, 3, 1]
    assert [float(one.sum()) for one in arrived] == [10.0, 20.0, 30.0, 40.0, 0.0]
    stream.queued[0].into.copy_(stream.queued[0].source)
    assert float(arrived[-1].sum()) == 250.0


def test_the_state_is_not_cloned_where_training_needs_the_room() -> None:
    stream = LateStream()
    stream.room = 4 * BIG + 511  # the large one, aligned, and nothing beside
    ring = StagingRing(stream)
    assert ring.clones([torch.ones(BIG)]) is not None
    assert ring.clones([torch.ones(BIG), torch.ones(1)]) is None
    stream.room, stream.out_of_memory = 1 << 40, True  # another process took it meanwhile
    assert ring.clones([torch.ones(1)]) is None


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
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here: clones were NOT made on a device")
def test_clones_on_a_gpu() -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    state = [torch.randn(10 * BIG, device=device), torch.randn(7, 5, device=device).t(), torch.tensor(3.0)]
    ring, kept = StagingRing(CudaCopyStream(device)), []
    for _ in range(3):
        expected = [one.cpu().clone() + 1 for one in state]
        torch.cuda._sleep(10**8)
        torch._foreach_add_(state[:2], 1)  # queued, not done
        state[2] += 1
        clones = ring.clones(state)
        assert clones is not None
        for one in state:
            one.mul_(0.5)
        for clone, value in zip(clones[:2], expected, strict=False):
            seen = np.concatenate([piece.copy() for piece in ring.staged(clone)])
            assert np.array_equal(seen, np.frombuffer(bytes_of(value.contiguous()), np.uint8))
        assert clones[2] == expected[2]
        del clones
        kept.append(torch.cuda.memory_reserved(device))
    assert kept[1] == kept[2]  # the memory of clones that are gone is used again


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here: the staging ring was NOT run on a device")
def test_on_a_gpu() -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    tensor = torch.randn(10 * BIG, device=device)
    torch.cuda._sleep(10**8)
    assert torch.equal(to_cpu(tensor + 1), tensor.cpu() + 1)
    ring = StagingRing(CudaCopyStream(device))
    for _ in range(3):
        tensor += 1  # queued, not done
        ring.follow()
        seen = np.concatenate([piece.copy() for piece in ring.staged(tensor)])
        assert np.array_equal(seen, np.frombuffer(bytes_of(tensor.cpu()), np.uint8))
    uploads = PinnedUploads(CudaCopyStream(device))
    for dtype in (torch.float32, torch.bfloat16):
        into = [torch.empty(BIG, dtype=dtype, device=device) for _ in range(8)]
        torch.cuda._sleep(10**8)
        for value, one in enumerate(into):
            uploads.write(lambda memory, value=value: memory.fill_(value), one)  # type: ignore[misc]
        assert all(bool((one == value).all()) for value, one in enumerate(into))
