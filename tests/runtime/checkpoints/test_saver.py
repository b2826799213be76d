"""Checkpoints go to disk when they are due; and what happens where that takes too long."""

from __future__ import annotations

import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from late_stream import LateStream, count_as_a_devices
from torch import nn

from atoll.agent.runtime.checkpoints import background_copy
from atoll.agent.runtime.checkpoints import saver as saving
from atoll.agent.runtime.checkpoints.disk import files, listing, transfer
from atoll.agent.runtime.checkpoints.disk.state import unpack_state
from atoll.agent.runtime.checkpoints.restore import Resumed
from atoll.agent.runtime.checkpoints.saver import Saver
from atoll.agent.runtime.data.sampler import Position
from atoll.agent.runtime.model.as_one import as_one
from atoll.agent.runtime.model.durable import NothingBeside
from atoll.agent.runtime.model.snapshot import Snapshot
from atoll.agent.runtime.staging import StagingRing
from atoll.checkpoints import export
from atoll.errors import CheckpointError
from atoll.strategies.dense.settings import Dense


def session_of(rank: int, world_size: int, directory: Path, said: list[str]) -> Any:
    return SimpleNamespace(
        job="tiny", run=1, view=1, in_force=True, seed=7, link=None, device=torch.device("cpu"), strategy=Dense(),
        place=SimpleNamespace(rank=rank, world_size=world_size, is_main=rank == 0),
        notice=lambda level, text: said.append(text),
        checkpoint=SimpleNamespace(directory=directory, every_steps=4, keep=3, keep_every_steps=0, store=""),
    )  # fmt: skip


def test_a_checkpoint_is_left_out_aloud_while_the_one_before_is_still_being_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """1. The disk hangs at step 4's. 2. Step 8's is left out with a warning, and training goes on. 3. The disk is back:
    step 4's is whole, with the weights of step 4, and step 12's is written."""
    said: list[str] = []
    session = session_of(0, 1, tmp_path, said)
    model = nn.Linear(3, 2)
    snapshot = Snapshot(model, torch.optim.SGD(model.parameters(), lr=0.1), {}, NothingBeside())
    saver = Saver(session, snapshot)
    saver.begin(writes=True, step=0, on_disk=None)
    answers, write = threading.Event(), files.write

    def hangs(*args: Any) -> Path:
        assert answers.wait(30)
        return write(*args)

    monkeypatch.setattr(saving.files, "write", hangs)
    monkeypatch.setattr(saving, "LONGEST_WAIT_S", 0.05)
    for step in (4, 8, 12):
        saver.wait_for_reads()
        with torch.no_grad():
            model.weight.fill_(step)
        if step == 12:
            answers.set()
            saver.close()
        snapshot.take(Position(epoch=0, consumed=step, step=step))
        saver.at_boundary(step)
    saver.close()
    assert said == ["checkpoint at step 8 is skipped: the one before is still being written; save less often"]
    found = {one.step: files.read(one.path).tensors["model/weight"] for one in listing.newest(tmp_path)}
    assert {step: set(weight.flatten().tolist()) for step, weight in found.items()} == {4: {4.0}, 12: {12.0}}


def test_training_waits_for_the_copy_of_the_state_only_where_it_would_change_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """1. Rank 0 copied the whole state at the boundary, on the training thread. 2. Now a thread does, and training goes
    on until its next update: that waits. 3. What is written is the boundary's."""
    may_copy, copied = threading.Event(), background_copy._copied

    def slowly(tensor: torch.Tensor, ring: StagingRing | None) -> torch.Tensor:
        assert may_copy.wait(30)
        return copied(tensor, ring)

    monkeypatch.setattr(background_copy, "_copied", slowly)
    model = nn.Linear(3, 2)
    snapshot = Snapshot(model, torch.optim.SGD(model.parameters(), lr=0.1), {}, NothingBeside())
    saver = Saver(session_of(0, 1, tmp_path, []), snapshot)
    saver.begin(writes=True, step=0, on_disk=None)
    nn.init.constant_(model.weight, 4.0)
    snapshot.take(Position(epoch=0, consumed=4, step=4))
    saver.at_boundary(4)  # returns, though nothing may be copied yet
    update = threading.Thread(target=lambda: (saver.wait_for_reads(), nn.init.constant_(model.weight, 5.0)))
    update.start()
    update.join(0.1)
    assert update.is_alive()
    may_copy.set()
    update.join(30)
    saver.close()
    (found,) = listing.newest(tmp_path)
    assert files.read(found.path).tensors["model/weight"].unique().tolist() == [4.0]
    assert model.weight.unique().tolist() == [5.0]


def test_training_does_not_wait_where_its_device_has_room_for_a_clone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """1. An update waited until the state had crossed to the CPU: 1 to 2 s of 4 GB. 2. The device has room: the state
    is cloned there. 3. Training updates, takes the next boundary and updates again before anything was copied. 4. What
    is written is the first boundary's."""
    may_copy, copied = threading.Event(), background_copy._copied

    def slowly(tensor: torch.Tensor, ring: StagingRing | None) -> torch.Tensor:
        assert may_copy.wait(30)
        return copied(tensor, ring)

    monkeypatch.setattr(background_copy, "_copied", slowly)
    count_as_a_devices(monkeypatch)
    model = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
    snapshot = Snapshot(model, torch.optim.SGD(model.parameters(), lr=0.1), {}, NothingBeside())
    saver = Saver(session_of(0, 1, tmp_path, said := []), snapshot)
    saver._ring = StagingRing(LateStream())
    saver.begin(writes=True, step=0, on_disk=None)
    state = model.state_dict()
    for step in (4, 5, 6):
        for one in state.values():
            one.fill_(step)
        snapshot.take(Position(epoch=0, consumed=step, step=step))
        saver.at_boundary(step)
        saver.wait_for_reads()
        snapshot.note_writes()
    may_copy.set()
    saver.close()
    (found,) = listing.newest(tmp_path)
    tensors = files.read(found.path).tensors
    assert {value for name in state for value in tensors[f"model/{name}"].flatten().tolist()} == {4.0}
    assert said == []


def test_ranks_that_reach_one_directory_write_a_shard_each(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """1. Three ranks, one directory, a state that is worth it. 2. Each writes a third, the last one publishes, old ones
    go. 3. What all wrote is the state."""
    monkeypatch.setattr(files, "SHARD_BYTES", 100_000)
    said: list[str] = []
    model = nn.Sequential(*(nn.Linear(200, 200) for _ in range(6)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    snapshots = [Snapshot(model, optimizer, {}, NothingBeside()) for _ in range(3)]
    savers = [Saver(session_of(rank, 3, tmp_path, said), snapshot) for rank, snapshot in enumerate(snapshots)]
    for step in (4, 8, 12, 16):
        for rank, saver in enumerate(savers):
            if step == 4:
                saver.begin(writes=rank == 0, writers=3, step=0, on_disk=None)
            snapshots[rank].take(Position(epoch=0, consumed=step, step=step))
            saver.at_boundary(step)
        for saver in savers:
            saver.wait_for_reads()
            saver._wait_for_write()
    for saver in savers:
        saver.close()
    assert said == []
    assert [one.step for one in listing.newest(tmp_path, pytest.fail)] == [16, 12, 8]
    found = files.read(listing.newest(tmp_path)[0].path)
    assert found.path is not None
    assert len(list(found.path.glob("state-*-of-00003.safetensors"))) == 3
    states = unpack_state(found.tensors, found.scalars)
    assert all(torch.equal(states["model"][name], one) for name, one in model.state_dict().items())


def test_moments_that_need_not_be_the_very_same_are_handed_over_in_sixteen_bits(tmp_path: Path) -> None:
    """1. A model has trained by AdamW. 2. Another takes its state, moments in 16 bits: two thirds of the bytes. 3. Its
    weights, counters and settings are the very same, its moments wide again and off by 1 part in 256 at most."""
    torch.manual_seed(3)
    model, other = nn.Linear(64, 32), nn.Linear(64, 32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for _ in range(5):
        optimizer.zero_grad()
        model(torch.randn(8, 64)).square().mean().backward()
        optimizer.step()
    snapshot = Snapshot(model, optimizer, {}, NothingBeside())
    snapshot.take(Position(epoch=0, consumed=40, step=5))
    saver = Saver(session_of(0, 2, tmp_path, []), snapshot)
    whole, brief = transfer.listed(saver.loaded()), transfer.listed(saver.loaded(brief_moments=True))
    everything = [True] * len(whole.tensors)
    assert brief.sent_bytes(everything) == pytest.approx(2 / 3 * whole.sent_bytes(everything), rel=0.01)

    into = torch.optim.AdamW(other.parameters(), lr=0.5)
    sent = transfer.gathered(brief, everything, saver.loaded(brief_moments=True).tensors)
    Resumed(transfer.from_bytes(transfer.to_bytes(brief)).read(everything, sent, {})).restore(
        other, into, snapshot.prepared
    )
    assert all(torch.equal(one, model.state_dict()[name]) for name, one in other.state_dict().items())
    assert into.state_dict()["param_groups"] == optimizer.state_dict()["param_groups"]
    for own, theirs in zip(model.parameters(), other.parameters(), strict=True):
        state, taken = optimizer.state[own], into.state[theirs]
        assert taken["step"] == state["step"] == 5
        for moment in ("exp_avg", "exp_avg_sq"):
            assert taken[moment].dtype == torch.float32
            torch.testing.assert_close(taken[moment], state[moment], rtol=1 / 256, atol=0)


class Grows(nn.Module):
    """Buffers that change in all ways, beside a layer with versions of its layout."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(3)
        self.register_buffer("grown", torch.zeros(0))
        self.register_buffer("late", None)
        self.register_buffer("gone", torch.zeros(2))
        self.register_buffer("counts", torch.zeros(2, dtype=torch.int64))

    def change(self) -> None:
        self.grown, self.late, self.gone, self.counts = torch.ones(4), torch.ones(2, 3), None, self.counts.double() + 1
        self.norm.register_buffer("lazy", torch.full((2,), 3.0))


@pytest.mark.parametrize("saved", [False, True], ids=["plain", "compiled"])
@pytest.mark.parametrize("loaded", [False, True], ids=["by plain", "by compiled"])
def test_buffers_come_back_in_the_shape_that_they_had_with_and_without_compile(
    tmp_path: Path, *, saved: bool, loaded: bool
) -> None:
    """A checkpoint was of another model as soon as a buffer had grown, or names had what torch.compile adds."""

    def made(compiled: bool) -> tuple[Any, torch.optim.Optimizer]:
        model = Grows()
        return torch.compile(model, backend="eager") if compiled else model, torch.optim.AdamW(model.parameters())

    model, optimizer = made(saved)
    snapshot = Snapshot(model, optimizer, {}, NothingBeside())
    saver = Saver(session_of(0, 1, tmp_path, []), snapshot)
    saver.begin(writes=True, step=0, on_disk=None)
    getattr(model, "_orig_mod", model).change()
    snapshot.take(Position(epoch=0, consumed=4, step=4))
    assert saver.save() is not None
    saver.close()
    checkpoint = files.read(listing.newest(tmp_path)[0].path)
    other, into = made(loaded)
    Resumed(checkpoint).restore(other, into, Snapshot(other, into, {}, NothingBeside()).prepared)
    expected = getattr(model, "_orig_mod", model).state_dict()
    found = getattr(other, "_orig_mod", other).state_dict()
    assert found.keys() == expected.keys()
    assert "gone" not in found
    assert all(found[name].dtype == one.dtype and torch.equal(found[name], one) for name, one in expected.items())
    export.write(checkpoint, tmp_path / "model.pt", safetensors=False)
    exported = torch.load(tmp_path / "model.pt", weights_only=True)
    assert exported.keys() == expected.keys()
    assert exported._metadata == expected._metadata  # type: ignore[attr-defined]


def test_an_optimizer_with_other_groups_is_named(tmp_path: Path) -> None:
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD([model.weight], lr=0.1)
    snapshot = Snapshot(model, optimizer, {}, NothingBeside())
    optimizer.add_param_group({"params": [model.bias]})
    snapshot.take(Position(epoch=0, consumed=4, step=4))
    loaded = Saver(session_of(0, 1, tmp_path, []), snapshot).loaded()
    other = torch.optim.SGD([model.weight], lr=0.1)
    with pytest.raises(CheckpointError, match=r"groups of \[1, 1\] parameters, where this one has \[1\]"):
        Resumed(loaded).restore(model, other, snapshot.prepared)


def test_an_emergency_checkpoint_leaves_out_groups_that_were_added_since_the_boundary(tmp_path: Path) -> None:
    """1. Two optimizers, a boundary, and the script adds a group to the first one. 2. A peer is lost: the checkpoint
    holds both optimizers as they were, which plain torch loads. 3. What is put back leaves the new group alone."""
    model = nn.ModuleList([nn.Linear(3, 2), nn.Linear(2, 1)])

    def optimizers() -> list[torch.optim.Optimizer]:
        return [torch.optim.SGD([model[0].weight], lr=0.1, momentum=0.9), torch.optim.Adam(model[1].parameters())]

    trained = optimizers()
    model[1](model[0](torch.ones(4, 3))).sum().backward()
    for one in trained:
        one.step()
    expected = [{"state": dict(one.state_dict()["state"]), "lr": one.param_groups[0]["lr"]} for one in trained]
    snapshot = Snapshot(model, as_one(trained), {}, NothingBeside())
    snapshot.take(Position(epoch=0, consumed=4, step=4))
    snapshot.hold()
    trained[0].add_param_group({"params": [model[0].bias], "lr": 0.5})
    trained[0].param_groups[0]["lr"] = 0.7
    saver = Saver(session_of(0, 1, tmp_path, []), snapshot)
    fresh = as_one(optimizers())
    Resumed(saver.loaded()).restore(model, fresh, snapshot.prepared)
    for place, one in enumerate(expected):
        loaded = fresh._optimizers[place].state_dict()  # type: ignore[union-attr]
        assert loaded["param_groups"][0]["lr"] == one["lr"]
        for number, state in one["state"].items():
            assert all(torch.equal(torch.as_tensor(value), torch.as_tensor(state[key]))
                       for key, value in loaded["state"][number].items() if value is not None)  # fmt: skip
    snapshot.put_back()
    assert [group["lr"] for group in trained[0].param_groups] == [0.1, 0.5]
