"""Shards of a state of which a part goes on changing, from live objects and back."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from atoll.agent.runtime.checkpoints.disk.header import Header, fingerprint
from atoll.agent.runtime.checkpoints.disk.state import unpack_state
from atoll.agent.runtime.checkpoints.memory.cost.state_size import size_of_state
from atoll.agent.runtime.checkpoints.memory.recovery.assembly import SharedState, assembled, own_state
from atoll.agent.runtime.checkpoints.memory.shards.shard_file import (
    Shard,
    SlotFile,
    Tail,
    bounds,
    content_of,
    own_of,
    parse,
    without_own,
)
from atoll.agent.runtime.checkpoints.memory.shards.shard_state import RollingShard
from atoll.agent.runtime.data.sampler import Position
from atoll.agent.runtime.model.durable import Floats, NothingBeside, Part
from atoll.agent.runtime.model.snapshot import Snapshot
from atoll.errors import CheckpointError
from atoll.strategies.shared_params.layout import Layer, lay_out_for_updates

RANKS = 3


class Model(nn.Module):
    """A weight in another order of memory, one of 16 bits, a tied one, a frozen one, buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 40, 3).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.narrow, self.frozen = nn.Linear(9, 7).bfloat16(), nn.Linear(300, 11).requires_grad_(False)
        self.norm = nn.BatchNorm1d(7)
        self.tied = self.narrow


class Rolling:
    """A rank's residuals are filled with its number; shared parameters come when they are asked for."""

    own_moments = True
    beside_moments = 0

    def __init__(self, layers: Sequence[Layer], rank: int) -> None:
        self.layers, self.rank = layers, rank
        self.parts: Sequence[Part] = ()

    def shared(self) -> Mapping[str, torch.Tensor]:
        return {f"shared_param.{layer.name}": layer.shared_param for layer in self.layers}

    def parameters(self) -> Collection[int]:
        return {id(layer.parameter) for layer in self.layers}

    def residuals(self) -> Mapping[str, int]:
        return {layer.name: layer.shared_param.numel() for layer in self.layers}

    def capture(self, parts: Sequence[Part], residuals: Mapping[str, Floats]) -> None:
        self.parts = parts
        for values in residuals.values():
            values[:] = self.rank

    def read(self) -> None: ...

    def wait(self, stopped: Callable[[], bool]) -> bool:
        for part in self.parts:
            part.into[:] = self.shared()[part.name].view(torch.uint8).numpy()[part.begin : part.end]
        return not stopped()


class Beside(NothingBeside):
    def __init__(self, rolling: Rolling) -> None:
        self._rolling = rolling

    def rolling(self) -> Rolling:  # type: ignore[override]
        return self._rolling

    def shared_params(self) -> Mapping[int, torch.Tensor]:
        return {id(layer.parameter): layer.shaped(layer.shared_param) for layer in self._rolling.layers}

    def shared(self) -> Mapping[str, torch.Tensor]:
        narrow = [layer for layer in self._rolling.layers if layer.parameter.dtype != torch.float32]
        return {"updates": torch.tensor(9), **{f"shared_param.{layer.name}": layer.shared_param for layer in narrow}}


def taken(model: Model, optimizer: torch.optim.Optimizer, layers: Sequence[Layer], rank: int) -> Snapshot:
    snapshot = Snapshot(model, optimizer, {}, Beside(Rolling(layers, rank)))
    snapshot.take(Position(0, 0, 2))
    return snapshot


def written(snapshot: Snapshot, rank: int, path: Path) -> Path:
    rolling = snapshot.durable.rolling()
    assert rolling is not None
    shard, file = RollingShard(snapshot, rolling, rank, RANKS, None), SlotFile(path)
    shard.look()
    shard.begin(file)
    shard.read()
    hashes = shard.complete(lambda: False)
    assert hashes is not None
    begin, end = bounds(shard.layout.total, rank, RANKS)
    header = Header(
        job="tiny", run=1, step=2, epoch=0, consumed=0, loader_step=2, world_size=RANKS, seed=7,
        model=fingerprint(snapshot.states()["model"]),
    )  # fmt: skip
    fields = {name: value for name, value in header.to_json().items() if name != "model"}
    tail = Tail(rank, RANKS, begin, end - begin, shard.layout.total, fields, shard.moving, own=shard.own)
    file.seal(tail.sealed(*hashes))
    file.close()
    return path


@pytest.fixture
def model() -> Model:
    torch.manual_seed(1)
    return Model()


@pytest.fixture
def layers(model: Model) -> list[Layer]:
    found = lay_out_for_updates(model)
    for layer in found:
        layer.shared_param += 1e-4 * torch.randn(layer.shared_param.shape)  # which 16 bits do not show
    return found


@pytest.fixture
def shards(model: Model, layers: list[Layer], tmp_path: Path) -> list[Path]:
    """Of three ranks; rank R's optimizer has moments of R, its buffers are R."""
    found = []
    for rank in range(RANKS):
        optimizer = torch.optim.Adam(model.parameters())
        for one in model.parameters():
            optimizer.state[one] = {"step": torch.tensor(2.0), "exp_avg": torch.full_like(one, rank)}
        model.norm.running_mean = torch.full((7,), float(rank))
        found.append(written(taken(model, optimizer, layers, rank), rank, tmp_path / f"{rank}.mem"))
    return found


def test_shared_params_come_from_all_and_the_rest_from_the_rank_that_had_it(
    model: Model, layers: list[Layer], shards: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also what travels between ranks: all shards without own bytes, and one rank's own bytes by themselves."""
    contents = [content_of(path) for path in shards]
    public: list[Shard] = [parse(without_own(content), own=False) for content in contents]
    state = SharedState.of(public)
    for rank in range(RANKS):
        checkpoint = assembled(state, rank, own_of(contents[rank]))
        states = unpack_state(checkpoint.tensors, checkpoint.scalars)
        for layer in layers:
            assert torch.equal(states["model"][layer.name], layer.shaped(layer.shared_param))
        assert torch.equal(states["model"]["frozen.weight"], model.frozen.weight)
        assert torch.equal(states["model"]["norm.running_mean"], torch.full((7,), float(rank)))
        assert states["optimizer"]["state"][0]["exp_avg"].unique().tolist() == [rank]
        assert torch.equal(states["strategy"]["shared_param.narrow.weight"], layers[2].shared_param)
        own = own_state(state, rank, own_of(contents[rank]))
        assert own.rank == rank
        assert {name: tensor.unique().tolist() for name, tensor in own.residual.items()} == {
            layer.name: [rank] for layer in layers
        }
        fresh = Model()
        fresh.load_state_dict(states["model"])
        for name, one in fresh.named_parameters():
            expected = next((x.shaped(x.shared_param) for x in layers if x.name == name), model.get_parameter(name))
            assert torch.equal(one, expected.to(one.dtype)), name
        checked = parse(contents[rank])
        assert np.array_equal(checked.own, own_of(contents[rank]))
    shared = sum(4 * layer.shared_param.numel() for layer in layers) + 4 * (300 * 11 + 11)
    assert sum(len(one.data) for one in public) == shared
    optimizer = torch.optim.Adam(model.parameters())
    size = size_of_state(model, [optimizer], taken(model, optimizer, layers, 0))
    assert size.shared == shared
    assert size.of_shard(RANKS) >= max(len(content) for content in contents) / 2
    monkeypatch.setattr(Rolling, "beside_moments", 640)
    assert size_of_state(model, [optimizer], taken(model, optimizer, layers, 0)).own == size.own + 640


def test_a_shard_that_says_it_has_other_tensors_is_refused(shards: list[Path]) -> None:
    contents = [content_of(path) for path in shards]
    public = [parse(without_own(content), own=False) for content in contents]
    state = SharedState.of(public)
    with pytest.raises(CheckpointError, match="take .* bytes; .* were written"):
        assembled(state, 0, own_of(contents[0])[:-4])
    public[1].tail.own["tensors"][0][0] = "owed.other"
    with pytest.raises(CheckpointError, match="what rank 1 had not sent is of other tensors"):
        own_state(state, 1, own_of(contents[1]))
    conv = "shared_param.conv.weight"
    for wrong in (["shared_param.none", [1], [1]], [conv, [10**6], [1]], [conv, [1], [-1]], 7):
        name = next(iter(public[0].tail.own["aliases"]))
        public[0].tail.own["aliases"][name] = wrong
        with pytest.raises(CheckpointError, match="shared tensors cannot be read"):
            assembled(state, 0, own_of(contents[0]))
