"""Live objects become shards and come back, whatever the number of ranks on either side."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import xxhash
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from atoll.agent.runtime.checkpoints.disk.header import Header, fingerprint
from atoll.agent.runtime.checkpoints.disk.state import unpack_state
from atoll.agent.runtime.checkpoints.disk.tensorfile import bytes_of
from atoll.agent.runtime.checkpoints.memory.recovery.assembly import SharedState, assembled
from atoll.agent.runtime.checkpoints.memory.shards.live_state import Layout, LiveState, Piece, Sources
from atoll.agent.runtime.checkpoints.memory.shards.shard_file import (
    CHUNK_BYTES,
    Shard,
    SlotFile,
    Tail,
    bounds,
    content_of,
    parse,
)
from atoll.agent.runtime.data.sampler import Position
from atoll.agent.runtime.model.durable import NothingBeside
from atoll.agent.runtime.model.snapshot import Snapshot
from atoll.errors import CheckpointError


class Model(nn.Module):
    def __init__(self, hidden: int = 700) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(600, hidden), nn.BatchNorm1d(hidden), nn.Linear(hidden, 1)
        self.tied = self.last.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.norm(self.first(x)))  # type: ignore[no-any-return]


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 2) -> None:
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randn(8, 600)).square().mean().backward()
        optimizer.step()


def written(live: LiveState, folder: Path, model: nn.Module, shards: int) -> list[Shard]:
    live.look()
    header = Header(
        job="tiny", run=1, step=2, epoch=0, consumed=0, loader_step=2, world_size=shards, seed=7,
        model=fingerprint(model.state_dict()),
    )  # fmt: skip
    fields = {name: value for name, value in header.to_json().items() if name != "model"}
    found = []
    for index in range(shards):
        begin, end = bounds(live.layout.total, index, shards)
        file = SlotFile(folder / f"{index}.mem")
        data = file.begin(live.layout.raw, live.layout.digest, end - begin)
        hashes = []
        for number, chunk in enumerate(live.layout.chunks(begin, end)):
            for piece in chunk:
                Sources().copy(live.tensors[piece.tensor], piece, data)
            hashes.append(xxhash.xxh3_64_hexdigest(data[number * CHUNK_BYTES : (number + 1) * CHUNK_BYTES]))
        tail = Tail(index, shards, begin, end - begin, live.layout.total, fields, live.moving, ())
        file.seal(tail.sealed(hashes))
        file.close()
        found.append(parse(content_of(file.path)))
    return found


def same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return type(one) is type(other) and len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


@pytest.mark.parametrize("shards", [1, 2, 3, 7])
@pytest.mark.parametrize("kind", ["adam", "sgd", "none"])
def test_shards_together_are_the_state_bit_for_bit(tmp_path: Path, shards: int, kind: str) -> None:
    """Chunks end inside tensors and shards inside chunks; a tied weight, buffers and a scheduler are in it."""
    model = Model()
    make = {"adam": torch.optim.AdamW, "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9)}
    optimizer: torch.optim.Optimizer = make.get(kind, lambda p: torch.optim.SGD(p, lr=0.1))(model.parameters())
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1)
    train(model, optimizer)
    scheduler.step()
    snapshot = Snapshot(model, optimizer, {"scheduler": scheduler}, NothingBeside())
    snapshot.take(Position(0, 0, 2))
    shards_found = written(LiveState(snapshot), tmp_path, model, shards)
    assert sum(len(shard.data) for shard in shards_found) > 1_600_000
    checkpoint = assembled(SharedState.of(shards_found))
    states = unpack_state(checkpoint.tensors, checkpoint.scalars)
    assert same(dict(states["model"]), dict(model.state_dict()))
    assert same(states["optimizer"], optimizer.state_dict())
    assert same(states["tracked.scheduler"], scheduler.state_dict())
    assert checkpoint.header.model == fingerprint(model.state_dict())


def test_what_is_looked_at_again_is_what_changed(tmp_path: Path) -> None:
    """1. Before its first step Adam has no state. 2. Two steps later the same layout holds, with other bytes and
    another learning rate. 3. A loaded state is other tensors, which are found."""
    model = Model(hidden=5)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    snapshot = Snapshot(model, optimizer, {}, NothingBeside())
    live = LiveState(snapshot)

    def look() -> tuple[bytes, float]:
        snapshot.take(Position(0, 0, 2))
        checkpoint = assembled(SharedState.of(written(live, tmp_path, model, 2)))
        states = unpack_state(checkpoint.tensors, checkpoint.scalars)
        assert same(states["optimizer"], optimizer.state_dict())
        assert same(dict(states["model"]), dict(model.state_dict()))
        return live.layout.digest, states["optimizer"]["param_groups"][0]["lr"]

    empty, _ = look()
    train(model, optimizer)
    first, _ = look()
    train(model, optimizer)
    optimizer.param_groups[0]["lr"] = 0.025
    second = look()
    optimizer.load_state_dict(optimizer.state_dict())
    train(model, optimizer)
    assert empty != first
    assert (first, 0.025) == second == look()


def test_weights_in_another_order_of_memory_are_kept_as_they_are(tmp_path: Path) -> None:
    model = nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    snapshot = Snapshot(model, optimizer, {}, NothingBeside())
    snapshot.take(Position(0, 0, 2))
    checkpoint = assembled(SharedState.of(written(LiveState(snapshot), tmp_path, model, 2)))
    assert torch.equal(unpack_state(checkpoint.tensors, checkpoint.scalars)["model"]["weight"], model.weight)


class CopiedBytes(TorchDispatchMode):
    """Counts what copies of tensors write."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0
        self.largest = 0  # entries

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func in (torch.ops.aten.clone.default, torch.ops.aten.copy_.default):
            self.bytes += out.nbytes
            self.largest = max(self.largest, out.numel())
        return out


@pytest.mark.parametrize(
    "tensor",
    [
        torch.randn(96, 64, 16, 9).to(memory_format=torch.channels_last),
        torch.randn(700, 1300, dtype=torch.float64).t(),
        torch.randn(3, 2_000_000).to(torch.bfloat16)[:, ::2],
        torch.randn(2, 1_000_000)[1:, ::3].t().expand(333_334, 4),
        torch.randn(5, 300_000, dtype=torch.complex64).t().conj(),
    ],
    ids=["channels_last", "transposed", "sliced", "expanded", "conjugate"],
)
def test_a_tensor_in_another_order_of_memory_is_copied_once_a_generation(tensor: torch.Tensor) -> None:
    """1. Weights of some MiB lie in memory in another order than row by row; a shard of them begins within an entry.
    2. They are taken chunk by chunk. 3. Each chunk copied the whole tensor (108 MiB: 4.4 s); now all chunks together
    copy it once, a few entries at a time, for which torch wakes no other thread. 4. The bytes are those of its rows."""
    assert not tensor.is_contiguous()
    expected = np.frombuffer(bytes_of(tensor.contiguous()), np.uint8)
    begin, sources, copied = 3, Sources(), CopiedBytes()
    data = np.zeros(expected.size - begin, np.uint8)
    with copied:
        for chunk in Layout(b"", b"", (expected.size,)).chunks(begin, expected.size):
            for piece in chunk:
                sources.copy(tensor, piece, data)
    assert np.array_equal(data, expected[begin:])
    assert expected.size > 3 * CHUNK_BYTES
    assert copied.bytes <= 1.01 * expected.size
    assert copied.largest < 32_768


def test_a_whole_tensor_in_another_order_of_memory_takes_no_second_one() -> None:
    """1. Under stale-sparse a rank's own tensors are pieces each. 2. One that lies in another order took memory of its
    whole size once more. 3. Now of a few entries."""
    tensor = torch.randn(96, 64, 16, 9).to(memory_format=torch.channels_last)
    data, copied = np.zeros(tensor.nbytes, np.uint8), CopiedBytes()
    with copied:
        Sources().copy(tensor, Piece(0, 0, tensor.nbytes, 0), data)
    assert np.array_equal(data, np.frombuffer(bytes_of(tensor.contiguous()), np.uint8))
    assert copied.largest < 32_768


def test_shards_of_two_moments_are_never_one_state(tmp_path: Path) -> None:
    model = Model(hidden=5)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    snapshot = Snapshot(model, optimizer, {}, NothingBeside())
    snapshot.take(Position(0, 0, 2))
    folders = [tmp_path / name for name in ("one", "two", "later")]
    for folder in folders:
        folder.mkdir()
    one, two, later = (
        written(LiveState(snapshot, view=view), folder, model, 2)
        for view, folder in zip((1, 1, 2), folders, strict=True)
    )
    assert assembled(SharedState.of([one[0], two[1]])).header.step == 2  # of the same moment they are
    for mixed in ([one[1], one[0]], [one[0]], [one[0], one[0]], [one[0], later[1]]):
        with pytest.raises(CheckpointError, match="of another state|is missing"):
            assembled(SharedState.of(mixed))
